# rlbench from a checkout. Needs Python >= 3.11 and make; everything else goes into .venv (see docs/install.md).
#   PYTHON=python3.12       the Python the environment is made of
#   RLBENCH_ENGINE=cpu|gpu  instead of what the machine has

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env lab demo test test-long check lint clean distclean

NEW_ENOUGH := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
QUICK := not engine and not slow and not long and not browser and not gpu
QUICK_TESTS = $(BIN)/pytest -q -n 2 --dist loadfile -m "$(QUICK)" $(PYTEST_ARGS)
QUICKSTART := notebooks/01_quickstart.ipynb

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

env:  ## the environment, .venv: made once, then only looked at
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { echo "rlbench: needs Python 3.11 to 3.14," \
		"found $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none): install one, or name it: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m rlbench.setup

lab: env  ## JupyterLab on the quickstart
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(QUICKSTART) $(LAB_ARGS)

demo: env  ## the quickstart's whole loop without a browser: reward curve, executed notebook in build/
	@$(BIN)/python scripts/run_notebook.py $(QUICKSTART) build/01_quickstart.executed.ipynb --show reward-curve

test: env  ## all tests but the long ones: first, two at a time, those that start nothing; without a GPU those for one skip
	$(QUICK_TESTS) || [ $$? = 5 ]  # 5: none of those chosen by PYTEST_ARGS
	$(BIN)/pytest -m "not long and not ($(QUICK))" $(PYTEST_ARGS) || [ $$? = 5 ]

test-long: env  ## the tests that take minutes each
	$(BIN)/pytest -m long $(PYTEST_ARGS)

lint: env  ## style, types, imports between rooms
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## lint, then the quick tests
	$(QUICK_TESTS)

clean:  ## remove what was built, and the tools' caches
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and the environment
	rm -rf .venv
