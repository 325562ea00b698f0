# Every target works in a clean clone: the virtual environment is made on first use and kept.

PYTHON ?=
VENV ?= .venv
ARGS ?=

NATIVE_SOURCES = CMakeLists.txt scripts/build_native.sh pocketllm/torch_engine/kernels/native.cpp \
	$(shell find cpp_engine -name 'build*' -prune -o -path cpp_engine/tests -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cmake' -o -name '*.pyi' -o -name CMakeLists.txt \) -print)

export PYTHON VENV

.DEFAULT_GOAL := help
.PHONY: help serve chat test lint bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: ARGS="--port 9000" (flags for the command), PYTHON=python3.12, VENV=.venv, TORCH_VERSION=2.13.0'

serve: $(VENV)/.installed ## serve the embedded model on http://127.0.0.1:8000
	@$(VENV)/bin/pocketllm serve $(ARGS)

chat: $(VENV)/.installed ## chat with the embedded model in this terminal
	@$(VENV)/bin/pocketllm chat $(ARGS)

test: $(VENV)/.installed-dev ## run the tests
	@scripts/test.sh $(ARGS)

lint: $(VENV)/.installed-dev ## run ruff and mypy
	@scripts/lint.sh

bench: $(VENV)/.installed ## measure prefill and decode beside the peers that are installed; llama.cpp too once scripts/build_llama_cpp.sh ran
	@$(VENV)/bin/pocketllm bench compare $(addprefix --peer ,$(wildcard build/llama.cpp/llama-bench)) $(ARGS)

clean: ## remove the virtual environment, builds and caches
	rm -rf .venv build dist cpp_engine/build* .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/clients/node/node_modules
	find pocketllm tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are files, so a second call installs nothing. Code changes need no new install: it is editable.
$(VENV)/.installed: pyproject.toml scripts/install.sh $(NATIVE_SOURCES)
	@scripts/install.sh
	@touch $@

$(VENV)/.installed-dev: pyproject.toml scripts/install.sh $(NATIVE_SOURCES)
	@scripts/install.sh dev,clients
	@touch $@ $(VENV)/.installed
