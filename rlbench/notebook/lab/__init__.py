"""The views of the loss lab."""
