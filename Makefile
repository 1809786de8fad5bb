# rlbench from a checkout. Needs Python >= 3.11 and make; everything else goes into .venv (see docs/install.md).
#   PYTHON=python3.12       the Python the environment is made of
#   RLBENCH_ENGINE=cpu|gpu  instead of what the machine has

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env panel lab demo test test-curves test-long test-all check lint lint-python lint-panel bench bench-scaling bench-gpu clean distclean

NEW_ENOUGH := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
BIN := .venv/bin
STAMP := .venv/rlbench-setup$(addprefix -,$(RLBENCH_ENGINE)).stamp
export PATH := $(CURDIR)/$(BIN):$(PATH)
# A worker starts as fast as Python finds byte code, of this checkout too; also where the shell forbids to keep it.
unexport PYTHONDONTWRITEBYTECODE
QUICK := not curve and not long and not browser and not engine and not slow and not gpu
SUITE_OPTIONS = $(if $(PYTEST_ARGS),-- $(PYTEST_ARGS))
QUICKSTART := notebooks/01_quickstart.ipynb

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 15

env: $(STAMP)  ## the environment, .venv: made once, then only looked at

$(STAMP): pyproject.toml $(wildcard constraints/*) rlbench/setup/install.py rlbench/setup/plan.py
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' 2>/dev/null || { echo "rlbench: needs Python 3.11 to 3.14," \
		"found $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none): install one, or name it: make PYTHON=…" >&2; exit 1; }
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m rlbench.setup
	@touch $@

panel: env  ## JupyterLab's side panel, where node is there to build it
	@$(BIN)/python scripts/panel.py

lab: panel  ## JupyterLab on the quickstart
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(QUICKSTART) $(LAB_ARGS)

demo: env  ## the quickstart's whole loop without a browser: reward curve, executed notebook in build/
	@$(BIN)/python scripts/run_notebook.py $(QUICKSTART) build/01_quickstart.executed.ipynb --show reward-curve

# Each phase runs to its end, its files two at a time, each process with a cluster, or a browser, of its own.
test: panel  ## all tests but curves and long ones: those without a browser, then those with one
	@$(BIN)/python scripts/suite.py tests browser $(SUITE_OPTIONS)

test-curves: env  ## what runs to its end: notebooks, examples, commands that train until a reward has risen; what takes 20 s
	@$(BIN)/python scripts/suite.py curves $(SUITE_OPTIONS)

test-long: env  ## those, and the other tests that take minutes each
	@$(BIN)/python scripts/suite.py curves long $(SUITE_OPTIONS)

test-all: panel  ## both of these: before a merge
	@$(BIN)/python scripts/suite.py tests browser curves $(SUITE_OPTIONS)

# mypy and the panel's tools take a core each.
lint: env  ## style, types, imports between rooms; where node is, the side panel's too
	@$(MAKE) --no-print-directory -j 2 lint-python lint-panel

lint-python:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

lint-panel:
	@$(BIN)/python scripts/panel.py lint

check: lint  ## lint, then the quick tests
	$(BIN)/pytest -n 2 --dist loadfile -q -m "$(QUICK)" $(PYTEST_ARGS)

bench: env  ## every figure of docs/performance.md, measured here in under 15 minutes; writes its table
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-scaling: env  ## how a step grows with model, tokens, ranks and replicas; a projection to 8 and 64 devices
	@$(BIN)/python -m benchmarks scaling $(BENCH_ARGS)

bench-gpu: env  ## the same figures on a GPU host; says what could not run
	@$(BIN)/python -m benchmarks --gpu --minutes 60 $(BENCH_ARGS)

clean:  ## remove what was built, and the tools' caches
	rm -rf build dist rlbench/labextension extension/lib extension/node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and the environment
	rm -rf .venv
