"""Prompts, and where they come from: sets, streams, mixtures, datasets."""
