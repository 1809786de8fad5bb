"""The session's state, telemetry and control: what outlives the kernel."""
