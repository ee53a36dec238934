# xDeepServe: `make help` lists what can be done; every target sets up what it needs.
SHELL := /bin/bash
PY := .venv/bin/python
READY := .venv/.ready
ARGS ?=

.DEFAULT_GOAL := help

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with pinned, hashed dependencies
$(READY): requirements.lock pyproject.toml deploy/setup.sh
	@bash deploy/setup.sh && touch $(READY)

demo: $(READY) ## start a pod, ask it things, compare every token with the reference, stop it
	@$(PY) -m services.cli demo

up: $(READY) ## start the embedded pod in the background (ARGS="--pace 1 --port 8000")
	@$(PY) -m services.cli up --detach $(ARGS)

down: $(READY) ## stop it
	@$(PY) -m services.cli down

status: $(READY) ## who is alive, what runs, where every KV block is
	@$(PY) -m services.cli status

verify: $(READY) ## random requests through a simulated pod against the reference (ARGS="--requests 50")
	@$(PY) -m services.cli verify $(ARGS)

test: $(READY) ## the whole suite
	@$(PY) -m pytest $(ARGS)

test-fast: $(READY) ## the suite without slow tests and real processes, under a minute
	@$(PY) -m pytest -m "not slow and not pod" $(ARGS)

model-check: $(READY) ## every interleaving of the send/receive protocol, with spin (apt-get install spin gcc)
	@XDS_REQUIRE_SPIN=1 $(PY) -m pytest tests/model_check $(ARGS)

test-oracle: .venv-oracle/.ready ## agreement with Hugging Face's implementation, and a training smoke
	@XDS_REQUIRE_ORACLE=1 .venv-oracle/bin/python -m pytest tests/oracle tests/train $(ARGS)

.venv-oracle/.ready: requirements.lock pyproject.toml deploy/setup.sh
	@bash deploy/setup.sh .venv-oracle oracle && touch .venv-oracle/.ready

check: lint types contracts ## lint, types, import contracts, wire contract: what CI checks before the tests

lint: $(READY) ## ruff: rules and format
	@.venv/bin/ruff check . && .venv/bin/ruff format --check -q .

types: $(READY) ## mypy --strict
	@.venv/bin/mypy

contracts: $(READY) ## who may import whom, and that proto/ agrees with the code
	@.venv/bin/lint-imports --no-cache | sed -n '/^Analyzed/,$$p'; exit $${PIPESTATUS[0]}
	@$(PY) -m libs.wire.schema --check

fmt: $(READY) ## format and sort imports
	@.venv/bin/ruff check --fix -q . ; .venv/bin/ruff format -q .

golden: $(READY) ## check the golden logit hashes of the shipped checkpoint
	@$(PY) -m libs.model.golden --check

lock: ## pin the dependencies again (needs uv)
	@uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url -q -o requirements.lock

clean: ## remove everything that can be made again
	@rm -rf .venv .venv-oracle .mypy_cache .ruff_cache .pytest_cache .hypothesis .xds
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup demo up down status verify test test-fast model-check test-oracle check lint types \
  contracts fmt golden lock clean
