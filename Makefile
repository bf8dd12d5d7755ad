# Two commands for a new user: `make demo` and `make test`. Both make the environment they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEPENDENCIES := $(VENV)/.dependencies
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# Python source alone, without wheels. Everything else comes as a wheel, so that no compiler is needed.
SOURCE_ONLY := cellpylib,zss

.DEFAULT_GOAL := help
.PHONY: help setup deps demo test chaos proof mutants bench-merge bench-train bench-recovery lint lock clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## make .venv from the lock file

$(STAMP): $(DEPENDENCIES) pyproject.toml
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

deps: $(DEPENDENCIES) ## the environment without Rayloom itself, as images want it

# pip is asked for torch's CPU build as it is configured; only where it has none, PyTorch's own
# index is named, for torch alone.
$(DEPENDENCIES): locks/cpu.txt
	@command -v $(PYTHON) >/dev/null || { echo "rayloom needs Python 3.11 ('$(PYTHON)' was not found); pass another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-deps '$(TORCH)' || $(PIP) install --quiet --no-deps --index-url $(TORCH_INDEX) '$(TORCH)'
	$(PIP) install --quiet --no-deps --require-hashes --only-binary :all: --no-binary $(SOURCE_ONLY) -r locks/cpu.txt
	@touch $@

demo: setup ## train the guessing game on two CPU cores and write a report
	$(BIN)/rayloom train deploy/configs/guessing-cpu.yaml

test: setup ## all the tests but those of `chaos` and `proof`
	$(BIN)/python -m pytest -m 'not scenario and not chaos and not proof' --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m 'scenario and not chaos and not proof'

chaos: setup ## whole runs whose parts die, freeze or are interrupted; SEED=n MINUTES=m: faults by chance
	$(if $(SEED),$(BIN)/python tests/chaos.py --seed $(SEED) --minutes $(or $(MINUTES),30),$(BIN)/python -m pytest -m 'chaos and not proof')

proof: setup ## the long proofs and `chaos`, or one part: PART=nodes (nodes die, are cut off), PART=chaos
	$(BIN)/python -m pytest -m '(proof or chaos)$(if $(PART), and $(PART))' --timeout 3600

mutants: setup ## plant the sixty faults of tests/mutants.toml one by one: each must fail its tests
	$(BIN)/python tests/mutants.py

bench-merge: setup build/peers/skyrl/.installed ## merging turns beside SkyRL 0.3.0, in an environment of its own
	$(BIN)/python -m benchmarks.merge --peer-python build/peers/skyrl/bin/python

bench-train: setup build/peers/trl/.installed ## training steps beside padded rows, merged rows and TRL 1.16.0; the loss's memory
	@status=0; \
	$(BIN)/python -m benchmarks.train_step || status=1; \
	$(BIN)/python -m benchmarks.train_step_padded || status=1; \
	$(BIN)/python -m benchmarks.train_step_trl --peer-python build/peers/trl/bin/python || status=1; \
	$(BIN)/python -m benchmarks.loss_memory || status=1; \
	exit $$status

bench-recovery: setup ## kill -9 of every part of a run, to the next finished step
	PYTHONPATH=tests $(BIN)/python -m benchmarks.recovery

build/peers/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps '$(TORCH)' || $(@D)/bin/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: setup ## resolve locks/cpu.in again (needs uv)
	uv pip compile locks/cpu.in --overrides locks/overrides.txt --generate-hashes --upgrade \
		--no-emit-index-url --no-header --no-annotate --python-version 3.11 -o locks/cpu.txt

clean: ## remove the environment and the caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
