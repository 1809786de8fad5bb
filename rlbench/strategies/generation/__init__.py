"""Generation driven from the ranks."""
