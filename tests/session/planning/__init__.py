"""Memory planned before it is spent."""
