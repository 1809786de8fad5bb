"""The line that lives while a cell runs."""
