"""What agents did at a session's endpoint: calls, joined on tokens to runs, as rollouts."""
