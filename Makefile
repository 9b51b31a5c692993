# Everything from a fresh machine with Python 3.10 or newer and make; a C++ compiler makes it fast.
#   make demo    the main job: compressed training on an emulated slow cluster, one table, one picture
#   make test    all tests            make check   style, types, layers, links
#   make bench   the measured rows of bench/results            make gpu-check   on a machine with an NVIDIA GPU
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpu/* cuda/*)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench gpu-check clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/ready

$(VENV)/ready: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("zcomm needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Say which: make PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python's venv module does not work; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (the first time takes a minute or two)"
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/zcomm demo --json demo.json --plot demo.png

test: setup
	$(RUN) -m pytest -m 'not gpu' $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) -m pytest -q tests/test_layers.py tests/test_public_names.py tests/test_docs.py -k 'not example'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(RUN) bench/kernels.py --json bench/results/kernels.json
	$(RUN) bench/collectives.py --sizes 64K,1M,16M,64M --json bench/results/collectives.json
	$(RUN) bench/mpi.py --sizes 4096,65536,1048576,16777216 --json bench/results/mpi.json
	$(RUN) bench/overhead.py --json bench/results/overhead.json
	$(RUN) bench/training.py --json bench/results/training.json

# Uses this Python as it is, if it has what is needed: a machine with a GPU may have nothing to download from.
gpu-check:
	@if $(PYTHON) -c 'import torch, cupy, pytest, ml_dtypes' 2>/dev/null; then PYTHONPATH=. $(PYTHON) bench/gpu_check.py; \
	else $(MAKE) setup && $(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev,cuda]' && \
	$(RUN) bench/gpu_check.py; fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
