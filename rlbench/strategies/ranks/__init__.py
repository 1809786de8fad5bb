"""How ranks agree and share."""
