# Everything is done inside .venv; `make demo` and `make test` are all the set-up there is.
PYTHON ?= $(shell scripts/find-python)
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for other processes: one more than there are cores keeps all of them busy.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Measuring makes the simulation, which is Python and nothing else, take twice as long; what it covers others cover too.
PYTEST := $(BIN)/pytest --quiet --tb=short -rfE --numprocesses $(WORKERS) --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo install test lint bench clean

demo: install
	scripts/demo $(BIN)/gpuyard

install: $(VENV)/.installed

test: $(VENV)/.installed-dev
	scripts/system-packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) tests/simulation
	$(PYTEST) --ignore tests/simulation --cov --cov-report=

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
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	touch $@
