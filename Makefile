# fleetlog: `make` sets up and runs the main job, `make test` sets up and checks everything.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export UV_PYTHON_DOWNLOADS := never
# The build backend looks for its binary on the path.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo setup test lint fmt lock bench soak clean help
.DEFAULT_GOAL := demo

demo: setup ## set up and run the main job on real parts, with a crash in the middle
	$(BIN)/fleetlog demo

setup: $(VENV)/.ready ## create .venv with exactly the locked packages

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fleetlog needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks the venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

lint: setup ## format check, lint, types, import contracts
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## everything CI checks
	$(BIN)/pytest

fmt: setup ## format and fix what can be fixed
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix .

lock: setup ## make requirements.lock again from pyproject.toml (no registry addresses in it)
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links --group dev pyproject.toml -o requirements.lock

bench: setup ## measure, each figure beside a raw baseline of the same run
	$(BIN)/python -m tests.benchmarks

soak: setup ## the long versions of the simulation and crash tests
	FLEETLOG_SOAK=1 $(BIN)/pytest tests/simulation tests/acceptance --timeout 1800

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "%-8s %s\n", $$1, $$2}' Makefile
