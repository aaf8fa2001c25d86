# `make` lists the targets. Everything is installed into .venv; nothing else is touched.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= runs/demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.DEFAULT_GOAL := help
# A line of the theme's authors about their next program.
export NO_MKDOCS_2_WARNING := 1
# Without bytecode each process of the tests would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo check test test-longer docs-test docs site

help:  ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: $(VENV)/.installed  ## fine-tune a pretrained model on 2,000 tweets with 2 workers
	$(BIN)/rapidformer demo --save $(DEMO)

define LINT
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
endef
# Tests that start four workers share one process, and the other process runs the rest file by file (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder

check: $(VENV)/.installed-dev  ## lint, format, types, and the quick tests that start no workers
	$(LINT)
	$(PYTEST) -m "not slow and not distributed and not deepspeed and not docs and not longer and not exhaustive"

test: $(VENV)/.installed-dev  ## lint, format, types and the tests, with those of docs-test
	$(LINT)
	$(PYTEST) --durations-file=build/durations.json

test-longer: $(VENV)/.installed-dev  ## further cases of these tests, and the commands of benchmarks
	$(PYTEST) -m longer

docs-test: $(VENV)/.installed-dev  ## the tests of the site, the notebook and the examples alone
	$(PYTEST) -m docs

docs: $(VENV)/.installed  ## write the pages about switches and rules, a table of docs/parallelism.md and the schema of YAML files anew
	$(BIN)/python -m rapidformer_templates.commands.catalogue docs
	$(BIN)/rapidformer schema > examples/rapidformer.schema.json

site: $(VENV)/.installed-dev  ## build the manual as a site into build/site
	$(BIN)/python -m mkdocs build --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$$($(PYTHON) --version) is too old: Python 3.11 or newer is needed (make PYTHON=python3.12 …)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps remember what is installed; only a change of the requirements installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch --editable '.[demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	touch $@
