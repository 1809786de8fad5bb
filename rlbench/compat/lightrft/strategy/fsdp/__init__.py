"""LightRFT's `strategy.fsdp`."""
