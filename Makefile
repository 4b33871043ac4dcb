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
ASCEND_TOOLS = mlir-19-tools llvm-19 libmlir-19-dev gcc
NPU_CONTRACT_TOOLS = gcc binutils

.PHONY: demo test test-trl-oldest test-zero3 test-families test-convergence test-convergence-quick test-ascend ascend-tools test-npu-contract npu-contract-tools checkstyle docs bench release clean

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

# The oldest TRL that pyproject.toml allows, laid over the environment: TRL alone is another one.
TRL_OLDEST = 1.15.0
TRL_OLDEST_DIR = $(VENV)/trl-$(TRL_OLDEST)

$(TRL_OLDEST_DIR): $(STAMP)
	$(BIN)/pip install -q --no-deps --upgrade --target $@ trl==$(TRL_OLDEST)

test-trl-oldest: $(TRL_OLDEST_DIR)  ## what depends on TRL, with the oldest that is supported
	PYTHONPATH=$(TRL_OLDEST_DIR) $(BIN)/python -c "import trl; assert trl.__version__ == '$(TRL_OLDEST)', trl.__version__"
	PYTHONPATH=$(TRL_OLDEST_DIR) $(BIN)/python -m pytest -n 2 --dist worksteal tests/patching/test_trl.py tests/trainers

# DeepSpeed changes what transformers and TRL import: it goes into an environment of its own on top of the first one.
ZERO3 = $(VENV)/zero3

$(ZERO3)/bin/deepspeed: $(STAMP)
	$(BIN)/python -m venv $(ZERO3)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(ZERO3)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	DS_BUILD_OPS=0 $(ZERO3)/bin/pip install -q deepspeed

test-zero3: $(ZERO3)/bin/deepspeed  ## DeepSpeed's ZeRO-3 on two CPU ranks
	$(ZERO3)/bin/python -m pytest tests/zero3

test-families: $(STAMP)  ## every model family of transformers, plain and patched; writes docs/models.md
	$(BIN)/python -m tests.families --write

test-convergence: $(STAMP)  ## trains small models both ways and compares the curves; gates releases
	$(BIN)/python -m convergence --full

test-convergence-quick: $(STAMP)
	$(BIN)/python -m convergence --quick --mutations

test-ascend: $(STAMP)  ## every kernel through the real Ascend compiler, in an environment of its own
	$(BIN)/tox run -e ascend

# LLVM 19, whose tools run the Ascend compiler's output on the CPU. Other systems than Debian: the same by other names.
ascend-tools:  ## installs what test-ascend needs beside Python packages, where it is absent and this is root
	@for tool in opt-19 llc-19 mlir-translate-19 llvm-config-19 gcc; do command -v $$tool >/dev/null || missing=1; done; \
	test -e "$$(llvm-config-19 --libdir 2>/dev/null)/libmlir_c_runner_utils.so" || missing=1; \
	if test -z "$$missing"; then exit 0; fi; \
	if test "$$(id -u)" = 0; then apt-get update -q && apt-get install -qy $(ASCEND_TOOLS); \
	else echo "missing; as root: apt-get install $(ASCEND_TOOLS)" >&2; exit 1; fi

test-npu-contract: $(STAMP)  ## the vendor's backend against torch_npu itself, in an environment of its own
	$(BIN)/tox run -e npu-contract

npu-contract-tools:  ## installs what test-npu-contract needs beside Python packages, where it is absent and this is root
	@for tool in gcc nm readelf; do command -v $$tool >/dev/null || missing=1; done; \
	if test -z "$$missing"; then exit 0; fi; \
	if test "$$(id -u)" = 0; then apt-get update -q && apt-get install -qy $(NPU_CONTRACT_TOOLS); \
	else echo "missing; as root: apt-get install $(NPU_CONTRACT_TOOLS)" >&2; exit 1; fi

checkstyle: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DOCS_STAMP = $(VENV)/.docs-installed

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install -q -e ".[docs]"
	touch $@

docs: $(DOCS_STAMP)  ## site/; a broken link or a public name without docstring is an error
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks

release: $(STAMP)  ## dist/: wheel, source and the convergence result; refuses without a full one of this commit that passed
	$(BIN)/python -m convergence --check-release
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m convergence --check-release --attach dist

clean:
	rm -rf $(VENV) .tox runs build dist site *.egg-info
