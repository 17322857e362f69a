# The commands of a fresh clone: `make serve` and `make test` do all the set-up they need.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test test-oldest check setup clean

setup: $(VENV)/.runtime

serve: $(VENV)/.runtime
	$(BIN)/ft serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# The model tests with the oldest transformers that pyproject.toml allows.
test-oldest: $(VENV)-oldest/.dev
	$(VENV)-oldest/bin/python -m pytest tests/model $(ARGS)

$(VENV)-oldest/.dev: $(VENV)/.dev
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]' 'transformers==5.17.*'
	@touch $@

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = "%d.%d.%d" % sys.version_info[:3]; sys.exit(0 if sys.version_info >= (3, 11) else "FreeToken needs Python 3.11 or newer; " + sys.executable + " is Python " + v + " (make PYTHON=/path/to/python3.11)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
