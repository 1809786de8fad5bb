"""How prompts, rollouts and batches are written to files and read back."""
