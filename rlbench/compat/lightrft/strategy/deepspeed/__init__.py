"""LightRFT's `strategy.deepspeed`."""
