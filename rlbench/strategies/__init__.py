"""What stands between a user's method and torch on a rank: prepare, backward, step, offload."""
