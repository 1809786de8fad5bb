"""Rollouts: turns, channels, scores, comparisons, advantages."""
