"""Whether a session fits, before anything is built: memory by role, owner and phase, and what makes it fit."""
