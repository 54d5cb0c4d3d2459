# Everything is done inside .venv; `make demo` and `make test` are all the set-up there is.
PYTHON ?= $(shell scripts/find-python)
VENV := .venv
BIN := $(VENV)/bin
# The environment is made anew when PYTHON names another version than the one in it: `make PYTHON=python3.13 test`.
MADE := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(VENV)/.python-*)))
ifeq ($(MADE),)
MADE := $(VENV)/.python-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Debian keeps Slurm's daemons where ordinary users do not look for programs.
export PATH := $(PATH):/usr/sbin
# Tests start thousands of programs, and none is to compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo install test test-full test-unit check lint docs bench dist clean

demo: install
	scripts/demo $(BIN)/gpuyard

install: $(VENV)/.installed

# What CI runs. `make test-full` adds all seeds, long runs and the coverage of started programs.
test test-full: %: $(VENV)/.installed-dev check docs
	scripts/system-packages
	$(BIN)/python scripts/run-tests $(if $(filter test-full,$@),--full)

# What needs no other programs: for systems other than Linux, and for a quick look.
test-unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --quiet --tb=short -rfE -m "not full" tests/unit tests/contract

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site is made anew in site/; `python -m http.server --directory site` shows it.
docs: $(VENV)/.installed-dev
	$(BIN)/python scripts/docs-site prepare
	$(BIN)/zensical build --strict --clean
	$(BIN)/python scripts/docs-site check

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench

# Wheel and source distribution, in dist/.
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf dist site build/docs .cache $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*

$(MADE):
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

# Older versions of pip write commands that import `re`, and take nearly half as long again.
$(VENV)/.installed: pyproject.toml $(MADE)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.2'
	$(BIN)/python -m pip install --quiet --editable '.[top,render]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

$(VENV)/.installed-dist: pyproject.toml $(MADE)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dist
	touch $@
