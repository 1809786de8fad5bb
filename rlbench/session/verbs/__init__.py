"""The verbs of a session, and the decorators that make them of step functions."""
