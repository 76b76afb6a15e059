# Two commands do everything on a machine with Python 3.11 or newer:
#   make demo   install what the demo needs, then train a small GPT on two processes and draw it
#   make test   install the rest, then format check, lint, types and all tests
# `make test TORCH=2.15.0` does the same with another torch, in an environment of its own.
PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   ?= $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-$(TORCH))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := $(VENV)/.demo
JOBS   ?= 2
# Older versions of torch declare other types than these two.
MYPY   := $(if $(filter 2.13.0 2.15.0,$(TORCH)),$(BIN)/mypy)
SETUP  := PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) bash scripts/setup.sh

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-full test-clients trust coverage gpu-check bench zoo clean

help:
	@echo "make demo       train a small GPT on two processes, beside the plain model"
	@echo "make test       every check and test; TORCH=2.15.0 for another torch"
	@echo "make test-full  the same with the whole grids (slow)"
	@echo "make test-clients  torchtitan, Accelerate and Lightning over fxpipe, in an environment of their own"
	@echo "make trust      what users must be able to trust, on fxpipe and on torch"
	@echo "make coverage   which Hugging Face architectures split; the table of docs/coverage.md"
	@echo "make gpu-check  all schedules and faults on the GPUs of this host, one report to send back"
	@echo "make zoo        timm, torchvision, diffusers and others, split; the table of docs/coverage.md"
	@echo "make bench      the benchmarks, beside torch.distributed.pipelining"

setup: $(READY)

$(DEMO): pyproject.toml scripts/setup.sh
	$(SETUP) demo
	@touch $(DEMO)

$(READY): pyproject.toml scripts/setup.sh
	$(SETUP) test
	@touch $(READY) $(DEMO)

demo: $(DEMO)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m fxpipe demo

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MYPY)

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full and not gpu and not clients"

test-full: check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not clients"

# torchtitan asks for any torch and would bring another one: its needs are named here. Version 0.3.0
# stands in a folder of its own beside 0.2.2.
CLIENTS := .venv-clients
$(CLIENTS)/.ready: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(CLIENTS) TORCH=$(TORCH) bash scripts/setup.sh test
	$(CLIENTS)/bin/python -m pip install --quiet triton datasets tyro einops tensorboard
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps torchtitan==0.2.2 torchdata accelerate spmd_types \
		lightning lightning-utilities torchmetrics pytorch-lightning
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --target $(CLIENTS)/torchtitan-0.3.0 torchtitan==0.3.0
	@touch $(CLIENTS)/.ready

test-clients: $(CLIENTS)/.ready
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients

trust: $(READY)
	$(BIN)/python -m benchmarks.trust

coverage: $(READY)
	$(BIN)/python -m benchmarks.hf_coverage --jobs $(JOBS) --page docs/coverage.md

gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu_check

# torchvision has no CPU build in every registry: its Python part is all that is needed.
ZOO := .venv-zoo
$(ZOO)/.ready: pyproject.toml scripts/setup.sh
	PYTHON=$(PYTHON) VENV=$(ZOO) TORCH=$(TORCH) bash scripts/setup.sh test
	$(ZOO)/bin/python -m pip install --quiet --no-deps torchvision==0.28.0
	$(ZOO)/bin/python -m pip install --quiet torch==$(TORCH) timm diffusers x-transformers \
		open_clip_torch peft monai segmentation-models-pytorch vit-pytorch
	@touch $(ZOO)/.ready

zoo: $(ZOO)/.ready
	$(ZOO)/bin/python -m benchmarks.zoo --jobs $(JOBS) --page docs/coverage.md

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-clients .venv-zoo build dist out site .mypy_cache .ruff_cache .hypothesis
