# Everything that is done with this repository. Needs Python 3.11 or newer, and installs the rest
# into .venv, in the versions of constraints.txt; for `versions` and `clients` into .venv-*.
# `make help` lists the targets.

PYTHON ?= python3
RANKS ?= 2
SCHEDULE ?= 1f1b
MICROBATCHES ?= 8
# More arguments for pip, such as PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# for the small CPU build of torch on Linux.
PIP_ARGS ?=
# Versions of torch that `make versions` tries beside the one of constraints.txt.
TORCH ?= 2.14.1 2.15.0
# Arguments for pytest, such as PYTEST_ARGS="-x tests/schedule" for some of the suite in one process.
PYTEST_ARGS ?= -n 3
# Arguments of `make clients`, such as CLIENTS_ARGS="torchtitan ZBV": a client, words of its runs.
CLIENTS_ARGS ?=

# What depends on torch.
TORCH_TESTS := tests $(patsubst %,--ignore=tests/%,browser cli search simulate view)

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

# A process per rank shares the machine's cores: one thread each.
export OMP_NUM_THREADS := 1
# Compiled modules are kept, also where the environment says otherwise: tests start a thousand
# processes, each of which would compile what it imports anew.
export PYTHONDONTWRITEBYTECODE :=
export SCHEDULE RANKS MICROBATCHES

.DEFAULT_GOAL := help
.PHONY: help demo test versions check docs package format bench clients browser clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10
	@echo
	@echo "demo takes SCHEDULE=$(SCHEDULE) RANKS=$(RANKS), MICROBATCHES and STEPS, as in"
	@echo "          SCHEDULE=zbv RANKS=4 make demo"

demo: $(VENV)/.demo-installed ## train a small GPT over pipeline stages (a few minutes)
	@# What can't be built, or not trained, is told in a line, before any process starts.
	@$(BIN)/penstock simulate "$(SCHEDULE)" --ranks $(RANKS) --microbatches $(MICROBATCHES) > /dev/null
	@$(BIN)/python examples/train_gpt.py --check
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py

test: browser ## run the test suite
	$(BIN)/pytest -q $(PYTEST_ARGS)

versions: $(TORCH:%=.venv-torch-%/.installed) ## run the tests that depend on torch with 2.14 and 2.15 (gigabytes)
	@for version in $(TORCH); do \
		echo "torch $$version"; \
		.venv-torch-$$version/bin/pytest -q $(PYTEST_ARGS) $(TORCH_TESTS) || exit; \
	done

check: browser ## lint, types, import contracts, then the test suite
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q $(PYTEST_ARGS)

docs: $(VENV)/.dev-installed ## build the site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

package: $(VENV)/.build-installed ## build wheel and sdist, and try both in a bare environment
	.ci/package $(BIN)/python $(PIP_ARGS)

format: $(VENV)/.dev-installed ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev-installed ## measure what docs/performance.md tells
	$(BIN)/python -m benchmarks.run

clients: $(CLIENTS)/.installed ## train other libraries through Penstock, beside torch's pipelining
	$(CLIENTS)/bin/python -m clients.run $(CLIENTS_ARGS)

browser: $(VENV)/.dev-installed ## get a Chromium for the browser tests, where there is none
	@.ci/browser $(BIN)/python

clean: ## remove the environment, caches and what runs left
	rm -rf $(VENV) .venv-* runs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The build tools are installed first, so that they are the pinned ones too and no other
# environment has to be made for the build.
$(VENV)/.build-installed: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is too old: Penstock needs Python 3.11 or newer; PYTHON=python3.12 make ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) build hatchling editables
	@touch $@

$(VENV)/.demo-installed: pyproject.toml $(VENV)/.build-installed
	$(PIP) --no-build-isolation -e '.[view]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml $(VENV)/.build-installed
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# An environment of its own: these libraries bring versions that Penstock's tests don't use.
$(CLIENTS)/.installed: pyproject.toml constraints-clients.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-clients.txt $(PIP_ARGS) -e '.[clients]'
	@# Without what it asks for beside transformers, most of it for CUDA; its pipelining imports none.
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps -c constraints-clients.txt $(PIP_ARGS) nemo-automodel
	@touch $@

.venv-torch-%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt \
		$(PIP_ARGS) hatchling editables
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt \
		$(PIP_ARGS) --no-build-isolation -e '.[test]'
	@touch $@
