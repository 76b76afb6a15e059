# Two commands do everything on a machine with Python 3.11 or newer:
#   make demo   set up, then train a small GPT on two processes and draw it
#   make test   set up, then format check, lint, types and all tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-full bench clean

help:
	@echo "make demo       set up and train models/gpt.py on two processes"
	@echo "make test       set up and run every check and test"
	@echo "make test-full  the same with the whole grids (slow)"
	@echo "make bench      the benchmarks, beside torch.distributed.pipelining"

setup: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash scripts/setup.sh
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m fxpipe demo

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full and not gpu"

test-full: check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu"

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist out site .mypy_cache .ruff_cache .hypothesis
