"""The live dashboard of a session."""
