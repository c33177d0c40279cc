# Set-up, tests and checks. `make help` lists the targets. Everything is installed into .venv, which the targets make.
#
#   make demo PYTHON=python3.12      another interpreter
#   make test TESTS=tests/flow       a part of the suite

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-video test check faults mutants clean

PYTHON ?= python3
TESTS ?= tests
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/runtime.stamp
VIDEO := $(VENV)/video.stamp
DEV := $(VENV)/dev.stamp
# A bare range would fetch the newest torch, often a CUDA build of several GB: name the pinned one.
TORCH = $(shell grep '^torch==' constraints.txt)
# Byte code is written when a module is first imported: compiling all of torch beforehand takes half of the installation.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
RECIPES = $(shell find recipes -name '*.yaml' | sort)

# $(call install,EXTRAS,WHAT): the stamps go before pip starts and come back when it has ended well. So an interrupted
# installation leaves none, and the next call begins with an empty environment.
define install
@set -e; \
if [ ! -e $(RUNTIME) ]; then \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		found=$$("$(PYTHON)" --version 2>/dev/null || echo missing); \
		echo "fewstep needs Python 3.11 or newer; $(PYTHON) is $$found. Name another: make $(MAKECMDGOALS) PYTHON=..." >&2; \
		exit 1; \
	}; \
	"$(PYTHON)" -m venv --clear $(VENV); \
fi; \
rm -f $(RUNTIME) $(VIDEO) $(DEV); \
echo "Installing $(2) into $(VENV): a minute or two ..."; \
$(PIP) $(TORCH) -e '.$(1)'
endef

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/' | expand -t 18

demo: $(RUNTIME)  ## train a teacher and its 4-step student on this machine, and show the report
	@$(call debian,dataset-fashion-mnist)
	@$(BIN)/fewstep demo

demo-video: $(VIDEO)  ## a video teacher, made causal, distilled to 4 steps, and streamed
	@$(call debian,dataset-fashion-mnist)
	@$(BIN)/fewstep demo-video

test: $(DEV)  ## the whole suite, or TESTS=tests/flow
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) $(TESTS)

check: $(DEV)  ## style, types, layers, spelling, recipes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/fewstep config check $(RECIPES)

faults: $(DEV)  ## kill, stop and starve real runs: nothing may be lost, left or hang
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m faults tests/faults tests/engines

mutants: $(DEV)  ## break the code in one place at a time: every break must turn a test red
	@$(BIN)/python -m tests.mutants.run

clean:  ## remove the environment and what the tools left behind
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml constraints.txt
	$(call install,,fewstep)
	@touch $@

$(VIDEO): pyproject.toml constraints.txt
	$(call install,[video],fewstep and what reads and writes videos)
	@touch $(RUNTIME) $@

$(DEV): pyproject.toml constraints.txt
	$(call install,[dev],fewstep and its development tools)
	@touch $(RUNTIME) $(VIDEO) $@

# $(call debian,PACKAGE): installs it where apt-get exists and may, without a question and without failing.
define debian
if command -v apt-get >/dev/null && ! dpkg -s $(1) >/dev/null 2>&1; then \
	root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	apt="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=0 -o Acquire::http::Timeout=20"; \
	{ $$apt install $(1) || { $$apt update && $$apt install $(1); }; } </dev/null >/dev/null 2>&1 || true; \
fi
endef
