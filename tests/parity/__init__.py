"""Our losses against another system's own numbers on the same model and batch."""
