"""How state is written so that it can always be read again."""
