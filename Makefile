# rlbench from a checkout. Needs Python >= 3.11 and make; everything else goes into .venv (see docs/install.md).
#   PYTHON=python3.12       the Python the environment is made of
#   RLBENCH_ENGINE=cpu|gpu  instead of what the machine has

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env panel lab demo test test-curves test-long check lint clean distclean

NEW_ENOUGH := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
BIN := .venv/bin
STAMP := .venv/rlbench-setup$(addprefix -,$(RLBENCH_ENGINE)).stamp
export PATH := $(CURDIR)/$(BIN):$(PATH)
ALONE := not engine and not curve and not long and not browser
QUICK := $(ALONE) and not slow and not gpu
TWO_AT_A_TIME := $(BIN)/pytest -n 2 --dist loadfile
# pytest's 5: among the tests chosen by PYTEST_ARGS none is of this kind; without a choice it is an error
OR_NONE = $(if $(PYTEST_ARGS),|| [ $$? = 5 ])
QUICKSTART := notebooks/01_quickstart.ipynb

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

env: $(STAMP)  ## the environment, .venv: made once, then only looked at

$(STAMP): pyproject.toml $(wildcard constraints/*) rlbench/setup/install.py rlbench/setup/plan.py
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { echo "rlbench: needs Python 3.11 to 3.14," \
		"found $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none): install one, or name it: make PYTHON=…" >&2; exit 1; }
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m rlbench.setup
	@touch $@

panel: env  ## JupyterLab's side panel, where node is there to build it
	@$(BIN)/python -m rlbench.setup.panel

lab: panel  ## JupyterLab on the quickstart
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(QUICKSTART) $(LAB_ARGS)

demo: env  ## the quickstart's whole loop without a browser: reward curve, executed notebook in build/
	@$(BIN)/python scripts/run_notebook.py $(QUICKSTART) build/01_quickstart.executed.ipynb --show reward-curve

# Files with engines run two at a time, each process with a cluster of its own; a browser gets the machine for itself.
test: panel  ## all tests but curves and long ones: those without engines, those with engines, those with a browser
	$(TWO_AT_A_TIME) -q -m "$(ALONE)" $(PYTEST_ARGS) $(OR_NONE)
	$(TWO_AT_A_TIME) -m "engine and not curve and not long and not browser" $(PYTEST_ARGS) $(OR_NONE)
	$(BIN)/pytest -m "browser and not curve and not long" $(PYTEST_ARGS) $(OR_NONE)

test-curves: env  ## the tests that train until a reward has risen, in notebooks, examples and commands
	$(TWO_AT_A_TIME) -m curve $(PYTEST_ARGS) $(OR_NONE)

test-long: test-curves  ## those, and the other tests that take minutes each
	$(BIN)/pytest -m "long and not curve" $(PYTEST_ARGS) $(OR_NONE)

lint: env  ## style, types, imports between rooms; where node is, the side panel's too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m rlbench.setup.panel lint

check: lint  ## lint, then the quick tests
	$(TWO_AT_A_TIME) -q -m "$(QUICK)" $(PYTEST_ARGS)

clean:  ## remove what was built, and the tools' caches
	rm -rf build dist rlbench/labextension extension/lib extension/node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and the environment
	rm -rf .venv
