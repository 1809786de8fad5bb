"""The rollout viewer, live and as a page."""
