# The commands of a fresh clone; each does the set-up it needs.
#   make serve   serve the demo model (ARGS="MODEL --port 8080" for more)
#   make test    run the tests        (ARGS="tests/api -x" for some, ARGS="-m ''" for the slow, too)
#   make test-oldest   the model tests with the oldest transformers that we support
#   make check   linters, types, import contracts
#   make setup   only install
#   make cuda    build the kernels in cuda/ for all GPUs (else the worker does it for its own)
# PYTHON: the interpreter to make the environment with. PIP_ARGS: passed to pip install.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# How many at once tests/conftest.py says. A file's tests share what they start. In order, since those
# that start servers are few and long, and would come last, where less runs beside them.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder
# Python keeps byte code, whatever the environment says: else each worker that a test starts compiles
# torch and transformers anew (19 s of CPU time instead of 8 to import them, two cores of an AMD EPYC).
export PYTHONDONTWRITEBYTECODE :=

define CHECK_PYTHON
import sys
v, name = sys.version_info, sys.executable or "this"
sys.exit(0 if v >= (3, 11) else "FreeToken needs Python 3.11 or newer; %s is %d.%d.%d " \
	"(make PYTHON=/path/to/python3.11)" % ((name,) + tuple(v[:3])))
endef
export CHECK_PYTHON

.PHONY: setup serve test test-oldest check cuda clean python
.NOTPARALLEL: # all share one environment

setup: $(VENV)/.runtime

serve: $(VENV)/.runtime
	$(BIN)/ft serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# The model tests with the oldest transformers that pyproject.toml allows.
test-oldest: $(VENV)-oldest/.dev
	$(VENV)-oldest/bin/python -m pytest tests/model $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

cuda: $(VENV)/.runtime
	$(BIN)/python tools/build_cuda.py $(ARGS)

# An environment is checked when it is made, and whenever PYTHON is asked for by name.
python:
	@$(PYTHON) -c "$$CHECK_PYTHON"

ifneq ($(origin PYTHON),file)
ENVIRONMENT_NEEDS := python
endif

$(VENV)/.made: | $(ENVIRONMENT_NEEDS)
	@$(PYTHON) -c "$$CHECK_PYTHON"
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

# One installation brings both. Most modules are never imported here, so none are compiled before.
$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.runtime $@

$(VENV)-oldest/.dev: $(VENV)/.dev
	$(PYTHON) -m venv --clear $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		-c constraints.txt -e '.[dev]' 'transformers==5.17.*'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
