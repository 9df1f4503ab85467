# Every target does its own set-up: on a fresh clone, `make test` is enough.

PYTHON ?= python3
# Test processes, by default one a core but at most four (each imports torch). WORKERS=0 runs the
# tests in one process, as a debugger wants it.
WORKERS ?= logical

BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal
READY := .venv/.ready
BENCH := .venv-bench/bin
PIP_BENCH := $(BENCH)/python -m pip -qq --disable-pip-version-check --no-input
READY_BENCH := .venv-bench/.ready

EXAMPLES := .venv-examples/bin
PIP_EXAMPLES := $(EXAMPLES)/python -m pip -qq --disable-pip-version-check --no-input
READY_EXAMPLES := .venv-examples/.ready

MAKEFLAGS += --silent
.DEFAULT_GOAL := help
# Under -j too, `check` stops at the first thing that is wrong and ends with the tests.
.NOTPARALLEL:
.PHONY: help setup test test-examples test-long check lint doctest format demo bench-loading bench-packing bench-prepare \
  bench-streaming clean

help: ## this list
	sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "make %-16s %s\n", $$1, $$2}'

setup: $(READY) ## .venv with everything pinned; redone when pyproject.toml or constraints.txt change

# torch comes first and by its exact version, so that nothing else chooses a build of it. The build
# backend is installed beside it, because an isolated build would fetch an unpinned one.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) cannot run Penstock, which needs Python 3.11 or newer with its venv module" \
	    "(Debian: apt install python3-venv): name another with make PYTHON=/path/to/python." >&2; exit 1; }
	echo "Setting up .venv (once)"
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,fast,hub]'
	touch $@

$(READY_BENCH): pyproject.toml benchmarks/requirements.txt
	echo "Setting up .venv-bench (once)"
	$(PYTHON) -m venv .venv-bench
	$(PIP_BENCH) install -c benchmarks/requirements.txt torch hatchling editables
	$(PIP_BENCH) install -r benchmarks/requirements.txt
	$(PIP_BENCH) install -c benchmarks/requirements.txt --no-build-isolation -e .
	touch $@

$(READY_EXAMPLES): pyproject.toml constraints.txt examples/requirements.txt
	echo "Setting up .venv-examples (once)"
	$(PYTHON) -m venv .venv-examples
	$(PIP_EXAMPLES) install -c constraints.txt torch hatchling editables
	$(PIP_EXAMPLES) install -c constraints.txt --no-build-isolation -e '.[dev,fast]'
	$(PIP_EXAMPLES) install -c constraints.txt -r examples/requirements.txt
	touch $@

test: $(READY) ## the tests, warnings as errors (a few minutes)
	$(PYTEST)

test-examples: $(READY_EXAMPLES) ## the examples, each in its trainer, killed and resumed
	$(EXAMPLES)/python -m pytest -n 0 -m examples tests/examples

test-long: $(READY) ## the tests and the long ones: soaks, many kills, 10^8 documents
	$(PYTEST) -m "long or not long" --timeout 7200

check: lint doctest test ## everything CI checks: format, lint, types, room order, doctests, tests

lint: $(READY)
	$(BIN)/ruff format --check --quiet || { echo "Run make format." >&2; exit 1; }
	$(BIN)/ruff check --quiet
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo

doctest: $(READY)
	$(BIN)/python -m pytest --quiet --doctest-modules src

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --quiet --fix-only
	$(BIN)/ruff format --quiet

demo: $(READY) ## a tour in one command
	$(BIN)/penstock demo

bench-loading: $(READY_BENCH) ## batches a second, beside peers (ARGS="..." is passed on)
	$(BENCH)/python benchmarks/loading.py $(ARGS)

bench-packing: $(READY_BENCH) ## documents and packed batches a second, beside peers
	$(BENCH)/python benchmarks/packing.py $(ARGS)

bench-prepare: $(READY_BENCH) ## text to a store, beside datatrove and the tokenizer alone
	$(BENCH)/python benchmarks/prepare.py $(ARGS)

bench-streaming: $(READY_BENCH) ## text to batches with no store, beside nanochat's way and datasets
	$(BENCH)/python benchmarks/streaming.py $(ARGS)

clean: ## remove caches and builds (rm -rf .venv sets up anew)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
