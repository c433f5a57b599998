# Everything starts from a machine with Python 3.10+ and make: each target sets up what it needs first (tools/setup_env.py).
.DEFAULT_GOAL := help
.PHONY: help demo build test lint check format fuzz gpu-test gpu-sanitize gpu-bench soak clean

PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in two sentences.
MODEL ?=
TESTS ?= tests
SANITIZER ?= memcheck
JOBS ?= 4
FILES ?= 1000000
SECONDS ?= 600
export PROMPT MODEL

SETUP = @$(PYTHON) tools/setup_env.py
RUN = "$$(cat build/python)"
CLANG_FORMAT = $(RUN) -c 'import clang_format, sys; sys.exit(clang_format.clang_format())'
CXX_FILES = $$(find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo:  ## a completion by a real model: make demo [PROMPT="..."] [MODEL=directory or file.gguf]
	$(SETUP) $(if $(MODEL),,demo)
	@$(RUN) -m pyllm generate "$${MODEL:-demo}" "$$PROMPT"

build:  ## the native parts and the package, in development mode
	$(SETUP)

test:  ## all tests that this machine can run (builds the kernels where nvcc is)
	$(SETUP) test
	@$(RUN) -m pytest $(TESTS)

lint:  ## ruff, clang-format, mypy
	$(SETUP) test check
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)
	@$(RUN) -m mypy

check: lint test  ## the gate: lint, then test

format:  ## rewrite the sources as lint wants them
	$(SETUP) test check
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .
	@$(CLANG_FORMAT) -i $(CXX_FILES)

fuzz:  ## a million mutated files through the loaders, recorded in bench/results/fuzz.jsonl [FILES=20000: not recorded]
	$(SETUP) test
	@$(RUN) -m tools.fuzz --files $(FILES) $(if $(filter 1000000,$(FILES)),--record)

gpu-test:  ## the GPU tests, recorded in bench/results/gpu_tests.jsonl [TESTS=tests/norm JOBS=4]
	$(SETUP) test
	@$(RUN) -m tools.gpu_tests --jobs $(JOBS) $(TESTS)

gpu-sanitize:  ## the small GPU tests under compute-sanitizer [SANITIZER=racecheck] [TESTS=tests/norm]
	$(SETUP) test
	@$(RUN) -m tools.gpu_tests --sanitizer $(SANITIZER) --jobs $(JOBS) $(TESTS)

gpu-bench:  ## every bench on this GPU, then docs/results.md from the records
	$(SETUP) bench
	@$(RUN) -m bench --all

soak:  ## 10 minutes of mixed requests and aborts on this GPU, recorded in bench/results/soak.jsonl [SECONDS=600]
	$(SETUP)
	@$(RUN) -m tools.soak --seconds $(SECONDS) --record bench/results/soak.jsonl

clean:  ## remove what was built, and the environment
	rm -rf build .venv *.egg-info pyllm/_kernels.so pyllm/_kernels.json pyllm/_runtime.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
