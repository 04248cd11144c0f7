# One command each. `make demo` and `make test` first set up what is missing; nothing is done twice.
# VENV=<folder> puts the environment elsewhere; PYTHON=<program> starts the set-up with another Python.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup system weights demo serve doctor test test-fast check format bench overhead lock clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## make the environment from the lock files (about 2 minutes, once)
	@test -n "$(PYTHON)" || { echo "setup: no python3 on PATH; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) backend/triton_lifecycle/launcher/bootstrap.py --venv $(VENV)

system: ## install the browser and the Prometheus that the tests use, if there are none (as root, once)
	@test -n "$(PYTHON)" || { echo "system: no python3 on PATH; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) backend/triton_lifecycle/launcher/system.py

weights: setup ## convert the default model, SmolLM2 (about 40 s, once)
	@$(BIN)/lifecycle prepare

demo: setup weights ## real Triton, real vLLM: stream an answer over gRPC and HTTP, show where the time went
	@$(BIN)/lifecycle demo

serve: setup weights ## keep a server in the foreground; Ctrl-C drains it
	@$(BIN)/lifecycle serve

doctor: setup ## look at everything a server needs
	@$(BIN)/lifecycle doctor

test: setup system weights ## run every test, also those against the real server
	@$(BIN)/python -m pytest

test-fast: setup system ## run the tests that start no server
	@$(BIN)/python -m pytest --ignore=tests/e2e

check: setup ## format, lint, types
	@$(BIN)/ruff format --check --quiet . || { echo "check: run \`make format\`" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

format: setup ## format the code and mend what the linter can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix .

bench: setup weights ## what becomes of requests under load: ours, vLLM's own server, ours switched off
	@$(BIN)/lifecycle bench --target vllm,ours,off --output-len 32

overhead: setup weights ## what the way through Triton costs, against the bare engine
	@$(BIN)/lifecycle bench overhead

lock: setup ## write the lock files anew from the environment
	@$(BIN)/python backend/triton_lifecycle/launcher/lock.py

clean: ## remove logs, layouts and caches
	@rm -rf .lifecycle .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	@find backend client tests load -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove the environment and the converted model as well
	@rm -rf $(VENV) model_repository/smollm2/1/weights
