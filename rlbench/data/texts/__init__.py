"""Texts that become batches: demonstrations, preferences, tokens of one's own."""
