# Two commands for a newcomer: `make tune` and `make test`. Both set up their own environment.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
STAMP = $(VENV)/.ready
RAY = $(VENV)/.ray
TARGETS_VENV ?= .venv-targets
TARGETS_STAMP = $(TARGETS_VENV)/.ready
PEERS_VENV ?= .venv-peers
PEERS_STAMP = $(PEERS_VENV)/.ready
PUBLIC_VENV ?= .venv-public
PUBLIC_STAMP = $(PUBLIC_VENV)/.ready

.PHONY: help tune test test-long targets targets-setup lint types docs release bench clean

help:
	@echo "make tune    tune a small transformer here: how much faster than plain JAX, and a report"
	@echo "make test    lint, types, and the tests; five minutes"
	@echo "make test-long  the rest: every option of every operation, several hosts, the examples"
	@echo "make targets compile the test kernels for TPU and CUDA, without such devices (700 MB)"
	@echo "make docs    the documentation site, in site/"
	@echo "make release wheel and sdist, built, checked, and installed into an empty environment"
	@echo "make bench   every benchmark and its peers, into docs/results.md and its charts (an hour, 3 GB)"
	@echo "make clean   remove the environment and caches"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# Ray is large and has no build for the newest Pythons at first: only the tests need it, and only
# those of the cluster, which are skipped without it.
$(RAY): $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[ray]" \
	  || echo "RAY CANNOT BE INSTALLED HERE: tuning on a cluster will not be tested"
	@touch $@

tune: $(STAMP)
	$(RUN) examples/tune_transformer.py

test: $(STAMP) lint types
	$(RUN) -m pytest -n auto --dist loadfile -m "not long"

test-long: $(STAMP) $(RAY)
	$(RUN) -m pytest -n auto --dist loadfile -m long

# In an environment of its own: with these plugins installed, JAX looks for their devices.
$(TARGETS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TARGETS_VENV)
	$(TARGETS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable ".[test,tpu-aot,cuda-aot]"
	@touch $@

targets-setup: $(TARGETS_STAMP)

targets: $(TARGETS_STAMP)
	JAX_PLATFORMS=cpu $(TARGETS_VENV)/bin/python -c \
	  "from ejkernel import targets; print(targets.available(ask=True))"
	$(TARGETS_VENV)/bin/python -m pytest tests/targets -n auto --dist loadfile

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

docs: $(STAMP)
	$(VENV)/bin/zensical build --strict --clean

release: $(STAMP)
	$(RUN) .ci/check_release.py

# The peers: torch and tune-jax beside us; the public package, which has our name, on its own.
$(PEERS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable ".[test]" torch==2.13.0 tune-jax
	@touch $@

$(PUBLIC_STAMP):
	$(PYTHON) -m venv $(PUBLIC_VENV)
	$(PUBLIC_VENV)/bin/python -m pip install --quiet --disable-pip-version-check ejkernel==0.0.80.3
	@touch $@

bench: $(PEERS_STAMP) $(PUBLIC_STAMP)
	$(PEERS_VENV)/bin/python benchmarks/results.py --public $(PUBLIC_VENV)/bin/python

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site .cache
