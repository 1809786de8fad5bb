"""The PPO trainers, their files and state."""
