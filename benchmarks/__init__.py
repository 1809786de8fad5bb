"""The figures this project holds itself to, measured as ratios of sides that take turns: `python -m benchmarks`."""
