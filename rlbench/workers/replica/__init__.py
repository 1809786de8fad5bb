"""An inference replica: vLLM in an actor."""
