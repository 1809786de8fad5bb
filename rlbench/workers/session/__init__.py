"""A session's engines as its training ranks use them."""
