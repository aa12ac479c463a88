# Every target first builds the virtual environment if it is missing or the lock has changed.
VENV ?= .venv
PYTHON ?=
ARGS ?=
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help environment train test test-slurm check audit bench campaign clean

help:
	@echo "make train   train a small model on this machine   (ARGS='train.steps=20 run.fresh=true')"
	@echo "make test    run all tests                         (ARGS='tests/unit -k gate')"
	@echo "make test-slurm   those of them that start a real SLURM (as root, with slurm-wlm and munge)"
	@echo "make check   lint, formatting, types, import rules"
	@echo "make audit   known vulnerabilities of locked packages, where a network can be reached"
	@echo "make bench   run the benchmarks of bench/"
	@echo "make campaign  kill runs and damage checkpoints at random   (ARGS='--minutes 30')"
	@echo "make clean   remove caches and build products; keeps $(VENV) and runs/"
	@echo "PYTHON=/path/to/python3.12 chooses the Python that $(VENV) is built with."

environment:
	@.ci/environment "$(VENV)" "$(PYTHON)"

train: environment
	@$(BIN)/python pretrain.py $(ARGS)

# In the order of their names: xdist would begin files of few but long tests last, where one worker is left alone with them.
test: environment
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slurm: environment
	@$(BIN)/python -m pytest -rs tests/slurm $(ARGS)

check: environment
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

audit: environment
	@.ci/audit $(BIN)/python $(ARGS)

bench: environment
	@set -e; for script in bench/*.py; do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

campaign: environment
	@$(BIN)/python -W ignore -m tests.campaign $(ARGS)

clean:
	@rm -rf build dist .ruff_cache .mypy_cache .pytest_cache .hypothesis .import_linter_cache .venv-ci
	@find . -name __pycache__ -not -path "./.venv*" -prune -exec rm -rf {} +
