"""What FSDP1 holds of a model: its units, and which numbers of a parameter a rank has."""
