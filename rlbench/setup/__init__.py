"""Install the engine set that fits this machine, with its pins; standard library alone, since it runs first of all.

`plan` says what, `install` does it; `make env` (`python -m rlbench.setup`) and `rlbench setup` run the same code.
"""
