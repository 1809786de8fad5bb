"""What a session did: verbs, metrics, gradients, history."""
