"""What is checked before a run, and why it went wrong after one."""
