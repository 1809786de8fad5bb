"""The models of a trainer: policy, critic, reward model."""
