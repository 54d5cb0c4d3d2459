# Everything is done inside .venv; `make demo` and `make test` are all the set-up there is.
PYTHON ?= $(shell scripts/find-python)
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for other processes: one more than there are cores keeps all of them busy.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
SPREAD := --numprocesses $(WORKERS) --dist worksteal
CLUSTERS := tests/integration/clusters
PYTEST := $(BIN)/pytest --quiet --tb=short -rfE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start thousands of programs, and none is to compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo install test test-simulation test-slurm test-ray lint bench clean

demo: install
	scripts/demo $(BIN)/gpuyard

install: $(VENV)/.installed

test: $(VENV)/.installed-dev
	scripts/system-packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --jobs 3 --output-sync=target test-simulation test-slurm test-ray
	$(PYTEST) $(SPREAD) --ignore tests/simulation --ignore $(CLUSTERS) --cov --cov-report=

# Measuring makes the simulation, which is Python and nothing else, take twice as long; what it covers others cover too.
test-simulation: $(VENV)/.installed-dev
	$(PYTEST) $(SPREAD) tests/simulation

# All tests of a kind share one cluster, and so a process. They mostly wait for it.
test-slurm test-ray: test-%: $(VENV)/.installed-dev
	$(PYTEST) $(CLUSTERS)/$*

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[top]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	touch $@
