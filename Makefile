# Two commands matter: `make demo` and `make test`. Each makes .venv on its first call.
# Who changes the code runs `make check`.
PYTHON ?= python3
EXTRAS ?= dev
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(EXTRAS)
REFERENCE := $(VENV)/installed-reference
LINTERS := $(VENV)/installed-lint
# Processes that find their bytecode start a second earlier, and both commands start dozens.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# A PYTHON given by hand that is not the venv's version makes the venv anew; the default never does.
version = $(shell $(1) -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null)
ifneq ($(origin PYTHON),file)
  ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
    RENEW := renew
  endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo paper test every check lint second gpus hosts hosts-part format clean renew

help:  ## show this list
	@echo "make TARGET [PYTHON=python3.12] [EXTRAS=dev,cuda12]"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP)  ## profile, plan and train under four policies on two processes, then compare them
	@$(BIN)/python experiments/demo.py

paper: $(STAMP)  ## the three papers' evaluations in simulation, to runs/paper (15 minutes)
	@$(BIN)/python -m experiments.paper

test: $(REFERENCE)  ## the tests, but those marked slow
	@$(PYTEST) --short

every: $(REFERENCE)  ## every test
	@$(PYTEST)

check: lint every second gpus hosts-part  ## lint, every test, a second Python, GPUs, launchers

lint: $(LINTERS)  ## ruff (lint and format check) and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run make format"; exit 1; }
	@$(BIN)/mypy --no-error-summary

second:  ## a few tests and a tiny run on another Python and jax, where there is one
	@.ci/second

gpus: $(STAMP)  ## compile a model's programs for GPUs that are not here
	@.ci/gpus

hosts: $(STAMP)  ## Slurm, Open MPI and failing hosts, virtual ones (root on Debian, 15 minutes)
	@$(BIN)/python benchmarks/hosts.py

hosts-part:
	@.ci/hosts

format: $(LINTERS)  ## let ruff fix and format the code
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

clean:  ## remove .venv, caches and build output; runs/ stays
	@rm -rf $(VENV) .venv-second .venv-gpus .venv-kernels build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml requirements.txt $(RENEW)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "'$(PYTHON)' is no Python >= 3.11; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@[ -z "$(RENEW)" ] && [ -x $(BIN)/python ] || $(PYTHON) -m venv --clear $(VENV) \
	  || { rm -rf $(VENV); exit 1; }
	@echo "installing dflop_jax[$(EXTRAS)] into $(VENV) (minutes the first time)"
	@$(BIN)/python -m pip --disable-pip-version-check -qq install -e '.[$(EXTRAS)]'
	@touch $@

$(REFERENCE): $(STAMP)
	@echo "installing what tests compare with (torch, transformers, peft)"
	@$(BIN)/python -m pip --disable-pip-version-check -qq install -e '.[reference]'
	@touch $@

$(LINTERS): $(STAMP)
	@echo "installing the linters, in the versions that pyproject.toml names"
	@$(BIN)/python -m pip --disable-pip-version-check -qq install -e '.[lint]'
	@touch $@
