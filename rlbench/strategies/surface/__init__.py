"""What a strategy does by itself: ranks, memory, steps."""
