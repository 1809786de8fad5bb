"""The options of a strategy."""
