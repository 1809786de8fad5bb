"""The columns that travelling values are made of: ragged arrays, optional packages, drawings by name."""
