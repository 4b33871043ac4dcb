# Short names for what people do. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV   ?= .venv
# With no torch installed, a bare requirement on torch pulls gigabytes of CUDA packages: name the build first.
# TORCH= (empty) leaves an installed torch alone, as does any torch that is in the environment already.
TORCH  ?= torch==2.13.0
# npu,dev on a machine with an Ascend NPU: triton-ascend and triton exclude each other.
EXTRAS ?= cuda,dev
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

.PHONY: demo test test-convergence test-convergence-quick test-ascend checkstyle bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e ".[$(EXTRAS)]"
	touch $@

demo: $(STAMP)  ## both example scripts, with and without the flag, and a table
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the tests, on the CPU: torch and Triton's interpreter
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

test-convergence: $(STAMP)  ## trains small models both ways and compares the curves; gates releases
	$(BIN)/python -m convergence --full

test-convergence-quick: $(STAMP)
	$(BIN)/python -m convergence --quick --mutations

test-ascend: $(STAMP)  ## every kernel through the real Ascend compiler, in an environment of its own
	$(BIN)/tox run -e ascend

checkstyle: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .tox runs build dist *.egg-info
