"""How a call reaches every worker and comes back: handles, call ids, epochs, fan-out, liveness."""
