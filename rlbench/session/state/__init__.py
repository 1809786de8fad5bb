"""Snapshots, checkpoints, undo, branches, healing."""
