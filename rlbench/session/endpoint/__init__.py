"""A session's live policy behind a URL, and what agents did there."""
