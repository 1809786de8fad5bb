"""A replica as an OpenAI-compatible endpoint: vLLM's serving classes over the engine that verbs use."""
