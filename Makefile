# SPDX-License-Identifier: Apache-2.0
# Everything starts here. `make` alone lists the targets; train and test need only make and Python 3.11 to 3.13.

PYTHON ?= python3
BAZEL ?= bazel
LOGDIR ?= runs/byte_transformer_gpipe2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.lingvo_gpipe_installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder

DOCS := CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=3 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.DEFAULT_GOAL := help
.PHONY: help setup train test test-quick bazel-test lint format typecheck docs docs-serve wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo 'Settings: PYTHON=$(PYTHON) LOGDIR=$(LOGDIR) BAZEL=$(BAZEL), for example: make train LOGDIR=/tmp/run'

setup: $(STAMP) ## make the virtual environment .venv and install the project (the other targets do it too)

train: $(STAMP) ## train a two-stage byte Transformer on the standard library's sources (again: resumes)
	$(BIN)/trainer --model=lm.stdlib.ByteTransformerGPipe2 --platform=cpu --logdir='$(LOGDIR)'

test: $(STAMP) ## run all tests (ARGS='tests/core/nested_map_test.py -k Flatten' for some)
	$(PYTEST) $(ARGS)

test-quick: $(STAMP) ## run a sample of the tests, some of each folder: under two minutes on two cores
	$(PYTEST) --sample $(ARGS)

bazel-test: $(STAMP) ## run the tests as Bazel targets (TAG=quick: no slow ones, TAG=kinds: one of each kind)
	@command -v $(BAZEL) >/dev/null || { \
	  echo "No '$(BAZEL)' here: 'apt-get install bazel-bootstrap' on Debian, or set BAZEL=/path/to/bazel." >&2; exit 1; }
	$(BAZEL) test --config=offline $(if $(TAG),--test_tag_filters=$(TAG)) //...

lint: $(STAMP) ## check for mistakes, unformatted files and conflicting dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pip check

format: $(STAMP) ## format the sources and fix what can be fixed automatically
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## check the types of lingvo_gpipe and tools
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation into site/; a broken link is an error
	$(DOCS) build --quiet

docs-serve: $(STAMP) ## show the documentation at http://localhost:8000 while you write it
	$(DOCS) serve

wheel: $(STAMP) ## build dist/lingvo_gpipe-*.whl
	$(BIN)/python -m build --wheel

clean: ## remove everything that make created, except runs
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if command -v $(BAZEL) >/dev/null; then $(BAZEL) clean; fi

# TensorFlow 2.21 has wheels for Python 3.11 to 3.13 only.
CHECK_PYTHON := import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
  "lingvo_gpipe needs Python 3.11, 3.12 or 3.13, and %s is %d.%d: set PYTHON=/path/to/python3.11" % ((sys.executable,) + v))

# Also if .venv exists but its Python is gone. Debian's Python may lack ensurepip: use its pip then.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "No '$(PYTHON)' here: install Python 3.11, or set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install pip; } || { \
	  rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)" >&2; exit 1; }

$(STAMP): pyproject.toml | $(BIN)/python
	@$(BIN)/python -c '$(CHECK_PYTHON)'
	@echo 'Installing lingvo_gpipe and TensorFlow into $(VENV): several minutes the first time.'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
