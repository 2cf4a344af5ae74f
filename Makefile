# Two commands for a newcomer: `make tune` and `make test`. Both set up their own environment.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
STAMP = $(VENV)/.ready

.PHONY: help tune test lint types bench clean

help:
	@echo "make tune    tune a small transformer on this machine, show before and after"
	@echo "make test    lint, types, and the whole test suite"
	@echo "make bench   measure the overhead of a call beside plain jax.jit"
	@echo "make clean   remove the environment and caches"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

tune: $(STAMP)
	$(RUN) examples/tune_transformer.py

test: $(STAMP) lint types
	$(RUN) -m pytest -n auto --dist loadfile

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

bench: $(STAMP)
	$(RUN) benchmarks/overhead.py

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
