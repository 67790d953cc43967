# make run   sets everything up, then runs the four official test cases and both checks
# make test  sets everything up, then runs the tests
# make lint  sets everything up, then ruff
# make clean removes what these made; do so before changing PYTHON
# ARGS="…"   goes to `mla run`, pytest or ruff
# JOBS=2     is how many processes the tests run in

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2

.DEFAULT_GOAL := run
.PHONY: run test lint clean

run: $(VENV)/ready
	$(VENV)/bin/mla run $(ARGS)

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check $(ARGS) .
	$(VENV)/bin/ruff format --check .

# The environment sees the system's packages, so that a ROCm or CUDA torch (and AMD's aiter) already there stay in use.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' \
	    || { echo "$(PYTHON) must be Python 3.10, 3.11 or 3.12: choose one with PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(VENV)/bin/python -c "import torch" 2>/dev/null \
	    || $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	@$(VENV)/bin/python -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8))' \
	    || { echo "the torch found here is older than 2.8: upgrade it, or hide it from $(PYTHON)"; exit 1; }
	$(VENV)/bin/python -c "import triton" 2>/dev/null && gfx950=gfx950-machine || gfx950=gfx950; \
	    $(VENV)/bin/python -m pip install --quiet --editable ".[test,lint,plots,$$gfx950]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
