"""FSDP2: wrapping, materialising, sources of weights."""
