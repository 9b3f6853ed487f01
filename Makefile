# Two commands matter: `make up` starts a cluster on this machine, `make test` runs the tests.
# Both set up what they need first; nothing is installed outside .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Two installers in one environment would trip over each other.
.NOTPARALLEL:

# The first of these that is 3.11, 3.12 or 3.13 makes the virtual environment.
PYTHON ?= $(shell for each in python3.13 python3.12 python3.11 python3 python; do \
	"$$each" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	>/dev/null 2>&1 && echo "$$each" && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# Without their dependencies, which are torch and CUDA builds that the CPU paths do not need.
TRANSFER_LIBRARIES := nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
# Options for the command behind a target: make up ARGS="--engine exact --workers 4".
ARGS ?=
# Processes that share the tests: two for a core, as many tests wait; three for two cores in `check`, whose tests start
# clusters. Each process costs 6 s of its own.
test: LANES ?= $(shell n=$$(($$(nproc) * 2)); echo $$((n < 12 ? n : 12)))
check: LANES ?= $(shell n=$$((($$(nproc) * 3 + 1) / 2)); echo $$((n < 12 ? n : 12)))
# Tests whose outcome may depend on Python's version: TLS, sockets, isolation, digests, asyncio.
VERSIONED := tests/transports/http/tls tests/transports/etcd/test_tls.py tests/transports/nats/test_tls.py \
	tests/transports/nats/test_connection.py tests/transports/nats/test_credentials.py tests/transports/tcp/test_sockets.py \
	tests/sim/isolation tests/sim/core tests/sim/disk tests/sim/net tests/sim/programs tests/runtime/engines/own \
	tests/runtime/test_public_names.py
# What `make search` does: seeds, soak, mutants or answers; for how long; from which seed, the clock's if empty.
WHAT ?= seeds
MINUTES ?= 10
SEED ?=
SEARCH_seeds = tests.search --minutes $(MINUTES) $(if $(SEED),--first $(SEED))
SEARCH_soak = tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))
SEARCH_mutants = tests.mutation
SEARCH_answers = tests.search.answers

PYTEST = $(BIN)/python -m pytest -n $(LANES) --dist loadfile

.PHONY: help up test check search pythons reach house lint types docs bench peers clean model

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@echo '  Options for the command behind a target go into ARGS="…".'

up: $(STAMPS)/run model ## Install, fetch the model and start a cluster on this machine.
	$(BIN)/trinamo up $(ARGS)

# The tests start many processes, which would each compile our sources if nothing was kept.
test check search: export PYTHONDONTWRITEBYTECODE =

test: $(STAMPS)/dev model ## Install and run the tests that every change needs, in about five minutes.
	$(PYTEST) -m 'not check and not search' $(ARGS)

check: $(STAMPS)/dev model ## Run what takes longer or needs more: outages, attacks, commands, other Pythons, browsers.
	$(PYTEST) -m check $(or $(ARGS),tests properties --ignore tests/house --ignore tests/clients)
ifeq ($(ARGS),)
# One process, as each would start a cluster of its own for its part of the programs.
	$(BIN)/python -m tests.clients.programs
	$(BIN)/python -m pytest tests/clients
	$(MAKE) pythons
endif

pythons: $(STAMPS)/dev
	@own=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	for version in 3.11 3.12 3.13; do \
		if [ "$$version" = "$$own" ]; then continue; fi; \
		for each in "python$$version" "$$HOME"/.pyenv/versions/"$$version".*/bin/python; do \
			"$$each" -c 'import ensurepip' >/dev/null 2>&1 || continue; \
			echo "== Python $$version"; \
			$(MAKE) test PYTHON="$$each" VENV=".venv-$$version" ARGS="$(VERSIONED)"; \
			break; \
		done; \
	done

search: $(STAMPS)/dev ## Search for MINUTES=10 at random: WHAT=seeds (scenarios and properties), soak, mutants or answers; ARGS=--help
	$(BIN)/python -m $(or $(SEARCH_$(WHAT)),$(error WHAT is seeds, soak, mutants or answers, and not "$(WHAT)")) $(ARGS)

reach: $(STAMPS)/dev ## List what of runtime/ and transports/ no simulated run executes; ARGS=--help
	$(BIN)/python -m tests.house.reach $(ARGS)

house: $(STAMPS)/dev ## Weigh the product, and count what one request walks through; ARGS=--names
	$(BIN)/python -m tests.house.figures $(ARGS)

lint: $(STAMPS)/dev ## Check style, format and the rules of this house: layers, sizes, names without a caller.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/house

types: $(STAMPS)/dev ## Check types with mypy and, as a second opinion, pyright.
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(STAMPS)/dev ## Write the pages that are made from the code.
	$(BIN)/python -m docs.generators

bench: $(STAMPS)/dev ## Run the benchmarks with their peers; see bench/README.md. One: ONLY=rpc ARGS=--help
	@$(if $(ONLY),,$(if $(ARGS),$(error ARGS are options of one benchmark: say which with ONLY=name)))
	for each in $(wildcard bench/bench_$(or $(ONLY),*).py bench/serving/bench_$(or $(ONLY),*).py); do echo "== $$each"; $(BIN)/python "$$each" $(ARGS); done

peers: $(BIN)/python ## Install what the benchmarks compare with, apart: Dynamo, routers, uvicorn.
	$(BIN)/python bench/peers.py install

clean: ## Remove the virtual environment, caches and build results; models stay.
	rm -rf $(VENV) .venv-3.* build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without the model the cluster runs on the engine `exact`, so a failure here stops nothing.
model: $(STAMPS)/run
	@$(BIN)/python -m trinamo.runtime.engines.llamacpp.model_file >/dev/null || \
		echo 'The model could not be fetched; the engine `exact` will be used instead.' >&2

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo 'trinamo needs Python 3.11, 3.12 or 3.13, and none was found.' \
			'Install one, or name it: make PYTHON=/path/to/python3.12' >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
		echo '$(PYTHON) is not Python 3.11, 3.12 or 3.13; name another: make PYTHON=…' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' 2>/dev/null || { \
		echo '$(PYTHON) cannot make virtual environments;' \
			'on Debian or Ubuntu install python3-venv.' >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# The stamps say that what pyproject.toml asks for is installed; `dev` includes `run`.
$(STAMPS)/run: pyproject.toml | $(BIN)/python
	@mkdir -p $(STAMPS)
	[ pyproject.toml -ot $(STAMPS)/dev ] || { \
		echo 'Installing into $(VENV): some minutes, once.' >&2; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[checksums,embedded,llamacpp,sim]'; }
	@touch $@

$(STAMPS)/dev: pyproject.toml | $(BIN)/python
	@mkdir -p $(STAMPS)
	@echo 'Installing into $(VENV): some minutes, once.' >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		$(TRANSFER_LIBRARIES) || echo 'NIXL and Mooncake could not be installed;' \
		'their tests are skipped.' >&2
	@# Compiles the tests once, since each of the processes that share them would do so at the same time.
	$(BIN)/python -m pytest --collect-only -qq >/dev/null || :
	@touch $@ $(STAMPS)/run
