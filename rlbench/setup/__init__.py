"""What must be installed, and how: the engine that fits this machine, with its pins.

`plan` says what to install, `indexes` where from, `install` does it; `make` and `rlbench setup` run the same
code. Standard library alone, since it runs first of all: `make` starts it as `python3 -m rlbench.setup`.
"""
