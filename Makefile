# Two commands for a new user: `make demo` and `make test`. Both make the environment they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEPENDENCIES := $(VENV)/.dependencies
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_INDEX := https://download.pytorch.org/whl/cpu
LOCK := cpu
LOCKED := $(PIP) install --quiet --no-deps --require-hashes

.DEFAULT_GOAL := help
# If Python does not store compiled modules, each of the tests' many processes compiles the project again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup deps demo demo-tiny test chaos proof stack image mutants bench-merge bench-gateway bench-train bench-trl bench-recovery bench-start lint lock docs dashboards-shot page clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## make .venv from the lock file

$(STAMP): $(DEPENDENCIES) locks/dev.txt locks/source-dev.txt pyproject.toml
	$(LOCKED) --only-binary :all: -r locks/dev.txt
	$(LOCKED) --use-pep517 --no-build-isolation -r locks/source-dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

deps: $(DEPENDENCIES) ## what Rayloom needs to run, as images want it; LOCK=cuda: on NVIDIA GPUs

# Install torch's CPU build from pip's configured index, or from PyTorch's own index if it is not there.
# All other packages are wheels, except those of source.txt and source-dev.txt, which are pure Python: no
# compiler is needed.
$(DEPENDENCIES): locks/$(LOCK).txt locks/source.txt locks/torch-cpu.txt
	@command -v $(PYTHON) >/dev/null || { echo "rayloom needs Python 3.11 ('$(PYTHON)' was not found); pass another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
ifeq ($(LOCK),cpu)
	$(LOCKED) -r locks/torch-cpu.txt || $(LOCKED) --index-url $(TORCH_INDEX) -r locks/torch-cpu.txt
endif
	$(LOCKED) --only-binary :all: -r locks/$(LOCK).txt
	$(LOCKED) --use-pep517 --no-build-isolation -r locks/source.txt
	@touch $@

demo: setup ## SmolLM2-135M-Instruct learns to add on two CPU cores, with a report of its answers
	$(BIN)/rayloom model smollm2 models/smollm2
	$(BIN)/rayloom train deploy/configs/addition-cpu.yaml

demo-tiny: setup ## a model of 0.85 M parameters learns a guessing game; nothing is downloaded
	$(BIN)/rayloom train deploy/configs/guessing-cpu.yaml

test: setup ## all the tests but those of `chaos` and `proof`
	@status=0; \
	$(BIN)/python -m pytest -m 'not scenario and not chaos and not proof' --numprocesses 3 --dist loadfile || status=1; \
	$(BIN)/python -m pytest tests/scenarios -m 'scenario and not chaos and not proof' --numprocesses 2 --dist loadfile || status=1; \
	exit $$status

chaos: setup ## runs and groups whose parts die, freeze or are interrupted; SEED=n MINUTES=m: faults by chance
	$(if $(SEED),$(BIN)/python tests/chaos.py --seed $(SEED) --minutes $(or $(MINUTES),30),$(BIN)/python -m pytest -m 'chaos and not proof' --durations 15)

proof: setup ## the long proofs and `chaos`, or one part: PART=training, clients, templates, nodes, release, chart, images, chaos, fuzz, families, settings, tutorials, lora, demo, slow, pages
	$(BIN)/python -m pytest -m '(proof or chaos)$(if $(PART), and $(PART))' --timeout 3600

stack: setup ## a service with Prometheus and Alertmanager, in the background; DO=status, DO=down
	$(BIN)/python -m deploy.stack $(or $(DO),up)

image: ## build the CPU image and train in it (needs root, buildah, mmdebstrap)
	$(MAKE) proof PART=images

mutants: setup ## plant the faults of tests/mutants.toml one by one: each must fail its tests
	$(BIN)/python tests/mutants.py

bench-merge: setup build/peers/skyrl/.installed ## merging turns beside SkyRL 0.3.0, in an environment of its own
	$(BIN)/python -m benchmarks.merge --peer-python build/peers/skyrl/bin/python

bench-gateway: setup build/peers/agentcore/.installed ## sessions beside the gateway of agentcore-rl-toolkit 0.2.0
	$(BIN)/python -m benchmarks.peer_gateway --peer-python build/peers/agentcore/bin/python

bench-train: setup build/peers/trl/.installed ## training steps beside padded rows, merged rows and TRL 1.16.0; the loss's memory
	@status=0; \
	$(BIN)/python -m benchmarks.train_step || status=1; \
	$(BIN)/python -m benchmarks.train_step_padded || status=1; \
	$(BIN)/python -m benchmarks.train_step_trl --peer-python build/peers/trl/bin/python || status=1; \
	$(BIN)/python -m benchmarks.loss_memory || status=1; \
	exit $$status

bench-trl: setup build/peers/trl/.installed ## whole trainings beside TRL 1.16.0, on one turn and with tools; MODEL=DIR: of SmolLM2 too
	PYTHONPATH=tests $(BIN)/python -m benchmarks.end_to_end --peer-python build/peers/trl/bin/python $(if $(MODEL),--model $(MODEL))

bench-recovery: setup ## kill -9 of every part of a run, to the next finished step
	PYTHONPATH=tests $(BIN)/python -m benchmarks.recovery

bench-start: setup ## from the command to the first step, stage by stage; MODEL=DIR: of SmolLM2 too
	$(BIN)/python -m benchmarks.start $(if $(MODEL),--model $(MODEL))

build/peers/%/.installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps -r locks/torch-cpu.txt || $(@D)/bin/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) -r locks/torch-cpu.txt
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

lint: setup ## style, types and plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/plain_english.py
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

RESOLVE := uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --no-annotate \
	--python-version 3.11 --python-platform x86_64-manylinux_2_36 --excludes locks/excluded.txt
# Exclude the packages of another lock file.
WITHOUT = $$(sed -n 's/^\([a-z0-9.-]*\)==.*/--no-emit-package \1/p' $(1))

# A locked version stays if it still fits. An upgrade resolves the GPU's lock file beginning with the
# versions of the CPU's, so that the tests on CPU cover most of its packages.
lock: ## resolve the lock files again, as pyproject.toml asks (needs uv); UPGRADE=1: the newest versions
	$(RESOLVE) $(if $(UPGRADE),--upgrade) --no-deps locks/source.in -o locks/source.txt
	$(RESOLVE) $(if $(UPGRADE),--upgrade) --no-deps locks/source-dev.in -o locks/source-dev.txt
	$(RESOLVE) $(if $(UPGRADE),--upgrade) pyproject.toml locks/cpu.in --extra cpu --extra reasoning-gym --extra trackers --extra retrieval --extra gymnasium --extra s3 \
		--excludes locks/excluded-cpu.txt $(call WITHOUT,locks/source.in) -o locks/cpu.txt
	$(if $(UPGRADE),cp locks/cpu.txt locks/cuda.txt)
	$(RESOLVE) pyproject.toml locks/cuda.in --extra cuda --extra reasoning-gym --extra trackers --extra retrieval --extra gymnasium --extra s3 \
		$(call WITHOUT,locks/source.in) -o locks/cuda.txt
	$(RESOLVE) $(if $(UPGRADE),--upgrade) pyproject.toml --extra cpu --extra reasoning-gym --extra trackers --extra retrieval --extra gymnasium --extra s3 \
		--extra textarena --extra skyrl-gym --extra dev \
		--excludes locks/excluded-cpu.txt --constraints locks/cpu.txt \
		$(call WITHOUT,locks/source.in locks/source-dev.in locks/cpu.txt) -o locks/dev.txt
	$(RESOLVE) $(if $(UPGRADE),--upgrade) locks/docs.in -o locks/docs.txt

docs: setup build/docs/.installed ## build the documentation as a site, in build/site
	$(BIN)/python -m deploy.reference build/reference
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet
	@echo "file://$(CURDIR)/build/site/index.html"

build/docs/.installed: locks/docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --only-binary :all: -r $<
	@touch $@

dashboards-shot: setup ## draw every dashboard with Grafana's components, in build/dashboards (needs npm, Chromium, Prometheus)
	mkdir -p build/dashboards/npm && cp deploy/dashboards/shot/* build/dashboards/npm
	cd build/dashboards/npm && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error && npm run --silent build
	PYTHONPATH=tests $(BIN)/python tests/dashboards_shot.py

page: ## pack the page again from service/page/src (needs npm)
	cd service/page && npm ci --no-audit --no-fund --ignore-scripts && npm run check && npm run build

clean: ## remove the environment and the caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
