"""The record of a session: a log of verbs, the script, trackers."""
