# `make up` serves the demo model on 1 prefill + 1 decode node behind the router; `make test` checks everything.
# Both make the virtual environment first. Settings:
#   PYTHON=python3.12        the interpreter (3.11 to 3.14)
#   VENV=.venv               where the environment goes
#   TORCH_INDEX=URL          install torch from this package index first (for example PyTorch's CPU index); what it
#                            needs comes from the usual one
#   CONSTRAINTS=             empty: newest versions that pyproject.toml allows instead of the tested ones
#   CONNECTOR=lmcache        `make up` with a pool behind the nodes: on LMCache's server, or `mooncake`
#   ARGS="--prefill 2"       more flags for `pd-cluster up`
#   PYTEST_ARGS="-k router"  more arguments for pytest
#   WORKERS=8                how many run tests at once (default: 4, for two cores)
#   MUTANTS_ARGS="lease"     more arguments for `make mutants` (--help names them)

SHELL := bash
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=
CONNECTOR ?= nixl
ARGS ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=

BIN := $(VENV)/bin
POOL := $(filter lmcache mooncake,$(CONNECTOR))
# pip builds packages in environments of their own, where -c does not reach: pip 24 reads the first, newer ones the second
PINNED_BUILD := $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS))
PIP := $(PINNED_BUILD) $(BIN)/python -m pip install --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
INPUTS := pyproject.toml $(wildcard $(CONSTRAINTS))
# The tests run small tensors in several processes at once: one thread each is fastest and repeatable.
# The tests start many processes. These keep their compiled files even if PYTHONDONTWRITEBYTECODE is set.
TEST_ENV := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# Tests of whole clusters often wait: three kept two cores 84% busy (585 s, four 536 s, both with 900 to 1,000 s of CPU)
WORKERS ?= 4

.PHONY: up test tests test-fast test-slow mutants lint format docs docs-serve clean
.DELETE_ON_ERROR:

up: $(VENV)/.installed $(POOL:%=$(VENV)/.installed-%)
	@$(BIN)/pd-cluster up --connector=$(CONNECTOR) $(ARGS)

# Lint runs beside the tests: their first 25 s, in which one process collects, leave a core idle
test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs=2 lint tests

# One queue of files for all workers, the longest first (tests/work_queue.py). A test that fails fails: nothing runs it
# again.
tests: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

# What decides and what speaks HTTP, as far as it is quick
FAST := tests/test_house.py tests/connectors tests/http tests/mutation tests/router tests/scheduling tests/server

test-fast: $(VENV)/.installed-dev
	@$(PYTEST) -n $(WORKERS) -q -x -m "not integration and not slow and not long" $(PYTEST_ARGS) $(FAST)

# A package of tests/world that cannot be had is named, and its tests are skipped
test-slow: $(VENV)/.installed-dev
	-$(BIN)/python -m tests.world.install
	$(PYTEST) -m slow --record-slow $(PYTEST_ARGS)

mutants: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m tests.mutation $(MUTANTS_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# NO_MKDOCS_2_WARNING: no advertisement of another generator among the build's lines
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path './.git' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -print0 | xargs -0 rm -rf

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 15); sys.exit(0 if ok else f"pd-cluster needs Python 3.11 to 3.14, and $(PYTHON) is {sys.version.split()[0]}: run make with PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch,@true)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(INPUTS)
	@echo "installing pd-cluster into $(VENV) (the first time this downloads torch)"
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.installed-lmcache $(VENV)/.installed-mooncake: $(VENV)/.installed-%: $(VENV)/.installed
	@echo "installing $* into $(VENV) (the first time this downloads up to 150 MB)"
	$(PIP) -e '.[bench,$*]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch $(INPUTS)
	@echo "installing pd-cluster, its pools and development tools into $(VENV) (the first time this downloads torch)"
	$(PIP) -e '.[lmcache,mooncake,dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-lmcache $(VENV)/.installed-mooncake $@
