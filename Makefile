# Short names for what people do. Everything runs in .venv, made on first use from locks/ (see `make lock`).
PYTHON ?= python3
VENV   ?= .venv
# Which build of torch is right differs from machine to machine, so no lock names it. An environment that has a torch
# already keeps it.
# npu on a machine with an Ascend NPU, where pip is offered torch's CPU build: triton-ascend and triton exclude each other,
# and a CUDA build wants triton. Neither has a lock there.
DEVICE ?= cuda
TORCH  ?= torch==2.13.0$(if $(filter npu,$(DEVICE)),+cpu)
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
LOCKED  = pip install -q --no-deps --require-hashes -r
ASCEND_TOOLS = mlir-19-tools llvm-19 libmlir-19-dev gcc
NPU_CONTRACT_TOOLS = gcc binutils

.PHONY: demo test test-processors test-perturbed test-oldest test-latest test-trl-oldest test-names test-transformers \
	test-transformers-before test-hub-kernels test-zero3 test-frameworks test-families test-moves test-convergence \
	test-convergence-quick test-ascend ascend-tools test-npu-contract npu-contract-tools checkstyle docs test-site \
	site-tools bench lock release clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml $(wildcard locks/*.txt) | $(BIN)/python
	$(BIN)/$(LOCKED) locks/dev.txt
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q $(TORCH)
ifeq ($(DEVICE),cuda)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/$(LOCKED) locks/cuda.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
else
	$(BIN)/pip install -q --no-build-isolation -e ".[$(DEVICE)]"
endif
	touch $@

demo: $(STAMP)  ## both example scripts, with and without the flag, and a table; DEMO=--quick: a step or two of each
	$(BIN)/python examples/demo.py $(DEMO)

# Empty, every test and every case; --quick, what each change is held to: no test marked full, and as many cases of each
# as it takes to have every value of every parameter once (tests/conftest.py). Releases are held to everything.
QUICK ?=

test: $(STAMP)  ## the tests, on the CPU: torch and Triton's interpreter; in a third of the time with QUICK=--quick
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) tests

# PyTorch sums in another order on each kind of processor, and `make test` reaches that of this one alone. The tests whose
# numbers are few or cancel are those that an accuracy rule fails first; `NUMBERS=tests` runs all. oneDNN looks at the
# processor by itself: if it found more than PyTorch is told, PyTorch's attention in bf16 would fail.
CAPABILITIES ?= avx2:AVX2 default:SSE41
NUMBERS ?= tests/ops tests/test_closeness.py tests/patching/test_tiled_mlp.py tests/robustness/test_fuzz.py

test-processors: $(STAMP)  ## the tests of numbers as on older processors: without AVX-512, and without AVX2
	for each in $(CAPABILITIES); do \
		ATEN_CPU_CAPABILITY=$${each%:*} ONEDNN_MAX_CPU_ISA=$${each#*:} \
			$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) $(NUMBERS) || exit 1; \
	done

# On another processor the same products give other bits for other strides, shapes and numbers of matrices. Tests that ask
# for equal bits run here with products that do so on every processor (CI: among the other tests); `BITS=all`: every test.
BITS ?= only-bits
LAYOUTS ?= tests

test-perturbed: $(STAMP)  ## tests that ask for equal bits, with products that round by the layout of their operands
	$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) --perturbed $(BITS) $(LAYOUTS)

OLDEST ?= oldest,trl-layers,trl-1.9

test-oldest: $(STAMP) npu-contract-tools  ## with the oldest torch, transformers and TRL, each in an environment of its own
	QUICK=$(QUICK) $(BIN)/tox run -e $(OLDEST)

# Who installs today gets what the index has today. A family that gets less there than `evidence/families.json` promises is
# a failure; the tests of `LATEST`, of what depends on other packages most, are news, for so many seconds.
LATEST ?= tests/patching/test_apply.py tests/patching/test_rotations.py tests/patching/test_padding_models.py \
	tests/patching/test_states.py tests/patching/test_body_graphs.py tests/rollouts/test_rollouts.py \
	tests/training/test_grpo_runs.py
LATEST_SECONDS ?= 150

test-latest: $(STAMP)  ## without the lock, with what the index has today: what is promised must be served; else news
	QUICK=$(QUICK) LATEST_SECONDS=$(LATEST_SECONDS) $(BIN)/tox run -e latest -- $(LATEST)

# The oldest TRL whose head is served, laid over the environment: TRL alone is another one.
TRL_OLDEST = 1.15.0
TRL_OLDEST_DIR = $(VENV)/trl-$(TRL_OLDEST)

$(TRL_OLDEST_DIR): $(STAMP)
	$(BIN)/pip install -q --no-deps --upgrade --target $@ trl==$(TRL_OLDEST)

test-trl-oldest: $(TRL_OLDEST_DIR)  ## what depends on TRL, with the oldest whose head is served
	PYTHONPATH=$(TRL_OLDEST_DIR) $(BIN)/python -c "import trl; assert trl.__version__ == '$(TRL_OLDEST)', trl.__version__"
	PYTHONPATH=$(TRL_OLDEST_DIR) $(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) tests/patching/test_trl.py \
		$(if $(QUICK),$(addprefix tests/training/test_,grpo.py grpo_runs.py trl_trainers.py),tests/training)

# Each version is laid over the environment; its own requirements need not be met, since the tests import torch alone.
VERSIONS ?= transformers==4.55.4 transformers==5.22.2 transformers==5.23.0 transformers==5.24.0 trl==1.15.0 trl==1.16.0

test-names: $(STAMP)  ## which names of other projects a version has no longer: VERSIONS="transformers==5.24.0 trl==1.16.0"
	for version in $(VERSIONS); do \
		$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/names/$$version $$version || exit 1; \
		echo "$$version:"; PYTHONPATH=$(VENV)/names/$$version $(BIN)/python -m pytest -q --noconftest tests/test_names.py || exit 1; \
	done

# Tests with a version of transformers that `test-names` has laid over the environment; not a relative path, since some
# tests start programs in other folders.
define with_transformers
	PYTHONPATH=$(abspath $(VENV))/names/transformers==$(1) $(BIN)/python -c \
		"import transformers as t; assert t.__version__ == '$(1)', t.__version__"
	PYTHONPATH=$(abspath $(VENV))/names/transformers==$(1) $(BIN)/python -m pytest -n 2 --dist worksteal $(2)
endef

# The transformers before the lock's, laid over the environment by `test-names`, and tests of what depends on it most.
TRANSFORMERS_BEFORE = 5.23.0

test-transformers-before: VERSIONS = transformers==5.22.2 transformers==$(TRANSFORMERS_BEFORE) trl==1.15.0
test-transformers-before: test-names  ## what depends on transformers most, with the version before the lock's
	$(call with_transformers,$(TRANSFORMERS_BEFORE),$(QUICK) tests/patching/test_apply.py tests/rollouts/test_masked.py)

# The same with all tests that depend on transformers, and a version of choice.
VERSION ?= 5.22.2
OF_TRANSFORMERS = $(addprefix tests/,capture cli convergence distributed families gains moves patching robustness rollouts \
	training test_callback.py test_compiled.py test_options.py test_run.py test_warmup.py test_wrong_options.py)

test-transformers: VERSIONS = transformers==$(VERSION)
test-transformers: test-names  ## the quick suite of what depends on transformers, with another version: VERSION=5.22.2
	$(call with_transformers,$(VERSION),--quick $(OF_TRANSFORMERS))

# DeepSpeed changes what transformers and TRL import: it goes into an environment of its own on top of the first one.
ZERO3 = $(VENV)/zero3

# Without pip, with which Python 3.11 brings a setuptools that hides the lock's and builds no wheel of DeepSpeed.
$(ZERO3)/bin/deepspeed: $(STAMP)
	$(BIN)/python -m venv --without-pip $(ZERO3)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(ZERO3)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	DS_BUILD_OPS=0 PIP_PYTHON=$(ZERO3)/bin/python $(BIN)/$(LOCKED) locks/zero3.txt --no-build-isolation

test-zero3: $(ZERO3)/bin/deepspeed  ## DeepSpeed's ZeRO-3, and rows spread over ranks, on two CPU ranks
	$(ZERO3)/bin/python -m pytest $(QUICK) tests/zero3

# With `kernels` transformers makes modules of its functions, for the whole process: it is laid over the environment, with
# the latest transformers that takes a version of it that the index has.
HUB_KERNELS = $(VENV)/hub-kernels

$(HUB_KERNELS): $(STAMP)
	$(BIN)/$(LOCKED) locks/hub-kernels.txt --upgrade --target $@

test-hub-kernels: $(HUB_KERNELS)  ## transformers' use_kernels=True with the package kernels itself
	PYTHONPATH=$(HUB_KERNELS) $(BIN)/python -c "from transformers.utils import is_kernels_available as there; assert there()"
	PYTHONPATH=$(HUB_KERNELS) $(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) tests/hub_kernels

# Frameworks that people train with, each with the versions that it asks for, in environments of their own.
LLAMA_FACTORY = $(VENV)/llamafactory
MS_SWIFT = $(VENV)/ms-swift

# PyPI's builds of torchvision and torchaudio want CUDA's torch: beside that of a CPU, LLaMA-Factory does without the one,
# and without the compiled part of the other, which it imports and uses for sound alone.
$(LLAMA_FACTORY)/bin/llamafactory-cli: | $(BIN)/python
	$(PYTHON) -m venv $(LLAMA_FACTORY)
	$(LLAMA_FACTORY)/bin/pip install -q $(TORCH)
	$(LLAMA_FACTORY)/bin/pip install -q llamafactory==0.9.5 $(TORCH) pytest
	$(LLAMA_FACTORY)/bin/python -c "import torch.version as v, sys; sys.exit(v.cuda is not None)" || exit 0; \
	$(LLAMA_FACTORY)/bin/pip uninstall -qy torchvision; rm -f $(LLAMA_FACTORY)/lib/python3*/site-packages/torchaudio/lib/*.so

$(MS_SWIFT)/bin/swift: | $(BIN)/python
	$(PYTHON) -m venv $(MS_SWIFT)
	$(MS_SWIFT)/bin/pip install -q $(TORCH)
	$(MS_SWIFT)/bin/pip install -q ms-swift==4.6.0 $(TORCH) pytest

test-frameworks: $(LLAMA_FACTORY)/bin/llamafactory-cli $(MS_SWIFT)/bin/swift  ## npu-kernels run with LLaMA-Factory and ms-swift
	$(LLAMA_FACTORY)/bin/python -m pytest tests/frameworks
	$(MS_SWIFT)/bin/python -m pytest tests/frameworks

test-families: $(STAMP)  ## every model family of transformers, plain and patched; writes docs/models.md
	$(BIN)/python -m tests.families --write

test-moves: $(STAMP)  ## what is served after moves of transformers' sources as releases make them, and that faults are not
	$(BIN)/python -m tests.moves $(QUICK)

test-convergence: $(STAMP)  ## trains small models both ways and compares the curves; gates releases
	$(BIN)/python -m convergence --full

test-convergence-quick: $(STAMP)
	$(BIN)/python -m convergence --quick --mutations --jobs 2

test-ascend: $(STAMP)  ## every kernel through the real Ascend compiler, in an environment of its own
	$(BIN)/tox run -e ascend -- $(QUICK) tests/ascend
	$(if $(QUICK),,$(BIN)/tox exec -e ascend -- python -m convergence --case llama-lm-ascend --json $$(mktemp))

# LLVM 19, whose tools run the Ascend compiler's output on the CPU. Other systems than Debian: the same by other names.
ascend-tools:  ## installs what test-ascend needs beside Python packages, where it is absent and this is root
	@for tool in opt-19 llc-19 llvm-extract-19 mlir-translate-19 llvm-config-19 gcc; do command -v $$tool >/dev/null || missing=1; done; \
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

docs: $(STAMP)  ## site/; a broken link or a public name without docstring is an error
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Chromium without a window. Other systems than Debian: any Chromium that tests/browser/browser.py finds.
SITE_TOOLS = chromium-headless-shell

test-site: $(STAMP)  ## every page of the site in Chromium, as wide as a phone and as a desktop
	$(BIN)/python -m pytest tests/browser

site-tools:  ## installs what test-site needs beside Python packages, where it is absent and this is root
	@for tool in chromium-headless-shell chromium chromium-browser google-chrome; do \
		if command -v $$tool >/dev/null; then exit 0; fi; done; \
	if test "$$(id -u)" = 0; then apt-get update -q && apt-get install -qy --no-install-recommends $(SITE_TOOLS); \
	else echo "missing; as root: apt-get install $(SITE_TOOLS)" >&2; exit 1; fi

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Every package that the targets install, with hashes, for every system and Python from 3.11 on. uv resolves for all of
# them at once, reads the oldest versions of our ranges out of pyproject.toml, and writes no address of an index.
LOCK = $(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock"

lock: $(STAMP)  ## locks/ anew, from what the index has today; commit it with the change that needs it
	$(LOCK) pyproject.toml --extra dev -o locks/dev.txt
	echo triton | $(LOCK) - -o locks/cuda.txt
	echo deepspeed | $(LOCK) - -c locks/dev.txt -o locks/zero3.txt
	$(LOCK) pyproject.toml --extra ascend --extra trl --extra test -o locks/ascend.txt
	$(LOCK) pyproject.toml --extra cuda --extra test --resolution lowest-direct -c locks/oldest.in -o locks/oldest.txt
	$(LOCK) pyproject.toml --extra test locks/trl-layers.in -o locks/trl-layers.txt
	$(LOCK) pyproject.toml --extra test locks/trl-1.9.in -o locks/trl-1.9.txt
	$(LOCK) locks/hub-kernels.in -o locks/hub-kernels.txt

release: $(STAMP)  ## dist/: wheel, source and the convergence result; refuses without a full one of this commit that passed
	$(BIN)/python -m convergence --check-release
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m convergence --check-release --attach dist

clean:
	rm -rf $(VENV) .tox runs build dist site *.egg-info
