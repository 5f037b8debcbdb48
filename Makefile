# SPDX-License-Identifier: Apache-2.0
# PYTHON makes the environment; VLLM_TARGET_DEVICE, PYKVCACHE_VLLM_VERSION and
# VLLM_PRECOMPILED_WHEEL_LOCATION choose what is installed in it (CONTRIBUTING.md).
# ARGS goes to the program that a target runs: make test ARGS='-k pool -x'

PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

.PHONY: help env test lint bench demo conformance soak clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## make or update .venv
	@$(PYTHON) scripts/env.py

test: env ## run the test suite
	@$(PY) -m pytest $(ARGS)

lint: env ## check style, format, types, the image's files
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m mypy --follow-imports=silent --explicit-package-bases vllm/v1/kv_offload/pykvcache
	@.venv/bin/hadolint Dockerfile
	@.venv/bin/shellcheck docker/pykvcache-serve scripts/image_test.sh

demo: env ## serve a model, restart it, answer from disk
	@$(PY) scripts/demo.py $(ARGS)

bench: env ## storage benchmark against fio and vLLM's own tier
	@mkdir -p build
	@$(PY) -m benchmarks.storage --quick --json build/storage.json $(ARGS)

conformance: env ## upstream's own tests on patched and unpatched vLLM
	@$(PY) scripts/conformance.py $(ARGS)

soak: env ## the long randomised tests
	@$(PY) -m pytest -m soak $(ARGS)

clean: ## remove .venv, the patched tree, build results and caches
	rm -rf .venv .editable build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
