"""A train batch: its rows, its file."""
