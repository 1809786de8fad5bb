"""What a trainer reports: log lines, trajectories, texts."""
