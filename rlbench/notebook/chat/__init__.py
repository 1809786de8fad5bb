"""The live view of a chat with the policy."""
