# `make` lists the targets. Everything is installed into .venv, and nothing outside of it is changed.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= runs/demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.DEFAULT_GOAL := help
# Hide an announcement of the theme's authors.
export NO_MKDOCS_2_WARNING := 1
# Without bytecode, each test process would compile the whole package again.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo check test test-longer test-optional docs-test docs site

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

test: $(VENV)/.installed-dev  ## lint, format, types, and the tests that one needs to trust a change
	$(LINT)
	$(PYTEST) --durations-file=build/durations.json

test-longer: $(VENV)/.installed-dev  ## further cases of these tests, docs-test, the rehearsal, benchmarks and scripts
	$(PYTEST) -m longer $(if $(DEADLINE),--deadline $(DEADLINE))

# peft imports bitsandbytes in every process, so that these packages have a folder of their own.
OPTIONAL := build/optional
NEEDING := $(addprefix tests/,commands/test_gguf.py commands/test_lm_eval.py \
  data/finetuning/test_chat_masks_beside_trl.py models/test_quantized_folders.py \
  recipes/test_distill.py recipes/test_grpo.py recipes/test_sweep.py \
  run/test_preferences_beside_trl.py $(addprefix switches/fp8/test_,pairs.py planned.py products.py) switches/lora/test_quantized.py \
  switches/optimizer/test_records.py switches/optimizer/test_updates.py)
LM_EVAL := lm_eval absl-py chardet colorama DataProperty evaluate lxml mbstrdecoder more_itertools pathvalidate portalocker \
  pytablewriter pytz rouge-score sacrebleu sqlitedict tabledata tabulate tcolorpy typepy word2number

test-optional: $(VENV)/.installed-dev  ## the tests that need torchao, bitsandbytes, TRL, Optuna, gguf or lm-eval, which make test skips
	$(PIP) --upgrade --no-deps --target $(OPTIONAL) torchao bitsandbytes trl optuna colorlog gguf $(LM_EVAL)
	PYTHONPATH=$(CURDIR)/$(OPTIONAL) $(BIN)/python -m pytest --complete $(NEEDING)

docs-test: $(VENV)/.installed-dev  ## only the tests of the site, the notebook, the examples and the pages of the manual
	$(PYTEST) -m docs

docs: $(VENV)/.installed  ## generate the pages about switches and rules, a table of docs/parallelism.md and the YAML schema
	$(BIN)/python -m scripts.manual.catalogue docs
	$(BIN)/rapidformer schema > examples/rapidformer.schema.json

site: $(VENV)/.installed-dev  ## build the manual as a site into build/site
	$(BIN)/python -m mkdocs build --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$$($(PYTHON) --version) is too old: Python 3.11 or newer is needed (make PYTHON=python3.12 …)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamp files record an installation. Only a change of the requirements installs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch --editable '.[demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
# Two test processes would otherwise build DeepSpeed's parts at once. Without a compiler, their tests are skipped.
	-$(BIN)/rapidformer doctor --build
	touch $@
