# make help lists the targets. Settings: LANE, PYTHON, NOTEBOOK, PARAMS, UPGRADE, PYTEST_ARGS, COUNTS.
LANE ?= tff
ifeq ($(LANE),tff)
  BIN := .venv/bin
  COUNTS := 3
else ifeq ($(LANE),current)
  BIN := .venv-current/bin
  COUNTS := 1
else
  $(error unknown LANE=$(LANE); there are tff (Python 3.11, TensorFlow Federated) and current (current Python and JAX))
endif

SHELL := /bin/bash
# Runs a command, then ends with an error if a process that it started is left.
WATCH := $(BIN)/python -m helpers.processes
NOTEBOOKS := $(BIN)/python -m helpers.notebooks
NBVAL := --nbval-current-env --nbval-sanitize-with notebooks/nbval_sanitize.cfg --nbval-cell-timeout 600
# The notebooks whose stored outputs are those of 8 devices; cells tagged nbval-check-output print the
# same on any number of them. One lane runs them on 3 devices, the other on 1, for the time it takes:
# COUNTS="1 2 3 5" tries more.
SPMD_NOTEBOOKS := $(filter-out notebooks/01_%,$(wildcard notebooks/*.ipynb))
export LANE PYTHON UPGRADE PARAMS

.PHONY: help venv run test test-all lab outputs badges bench lock html lint clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 16
	@echo '  settings: NOTEBOOK=notebooks/01_….ipynb (run, outputs, html)  PARAMS="scale=full" (run)'
	@echo '            LANE=current (all but lock): current Python and JAX in .venv-current; LANE=tff is the default'
	@echo '            PYTHON=/path/to/python3.11 (venv)  UPGRADE=1 (lock)  PYTEST_ARGS="-k …" (test)  COUNTS="1 3" (test)'

venv: ## build the lane's environment from its lock if it is missing or stale (the others do it by themselves)
	@bash .ci/venv

run: venv ## execute the notebooks at demo scale and write HTML to build/run
	@$(WATCH) $(NOTEBOOKS) run --parameters "$$PARAMS" $(NOTEBOOK)

test: venv ## lint, the tests, then every notebook against its stored outputs, on 8 and on 3 (LANE=current: 1) devices
	$(BIN)/ruff check
	$(WATCH) $(BIN)/python -m pytest tests $(PYTEST_ARGS)
	$(WATCH) $(BIN)/python -m pytest notebooks --nbval $(NBVAL) $(PYTEST_ARGS)
	set -e; for count in $(COUNTS); do \
	  echo "== on $$count devices"; \
	  XLA_FLAGS="$$XLA_FLAGS --xla_force_host_platform_device_count=$$count" \
	    $(WATCH) $(BIN)/python -m pytest $(SPMD_NOTEBOOKS) --nbval-lax $(NBVAL) $(PYTEST_ARGS); \
	done

test-all: ## the same in both lanes, one after the other
	@$(MAKE) test LANE=tff
	@$(MAKE) test LANE=current

lab: venv ## open JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir=notebooks

outputs: venv ## execute the notebooks at demo scale and store their outputs in place
	@$(WATCH) $(NOTEBOOKS) outputs $(NOTEBOOK)

badges: venv ## stamp Colab badges and set-up cells with the repository's address from pyproject.toml
	@$(NOTEBOOKS) badges $(NOTEBOOK)

bench: venv ## run every benchmark; each prints a table
	@set -e; for file in $(sort $(wildcard benchmarks/bench_*.py)); do echo "== $$file"; $(WATCH) $(BIN)/python $$file; done

lock: ## compile the locks of both lanes; keeps their pins unless UPGRADE=1
	@bash .ci/lock

html: venv ## build the site, the notebooks with their stored outputs and an index, in build/html
	@$(BIN)/python -m helpers.site $(NOTEBOOK)

lint: venv ## ruff: findings and formatting
	@$(BIN)/ruff check && $(BIN)/ruff format --check

clean: ## remove what the targets wrote, but not .venv and .venv-current
	@rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis .ipynb_checkpoints notebooks/.ipynb_checkpoints
