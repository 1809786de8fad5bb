"""The loss lab: losses side by side on one batch."""
