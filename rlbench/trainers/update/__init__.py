"""The policy update, and that of a value model."""
