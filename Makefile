# Each target does all its own set-up on a fresh machine that has Python 3.11 or newer and a C++17
# compiler; see BUILD.md. JOBS: processes at a time. ARGUMENTS: passed on to the program.

.DELETE_ON_ERROR:
.PHONY: test train bench build wheel lint format clean

JOBS ?= $(shell nproc)
ARGUMENTS ?=
# The first of these that is new enough; 3.11 is the oldest that we support, so develop with it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

VENV := .venv
RUN := $(CURDIR)/$(VENV)/bin
export PYTHONPATH := $(CURDIR)

test: lint build
	$(RUN)/python -m pytest -m "not gpu and (not slow or package)" --numprocesses $(JOBS) --dist loadfile $(ARGUMENTS)

train: build
	$(RUN)/python examples/train_char_lm.py $(ARGUMENTS)

bench: build
	$(RUN)/python benchmarks/attention.py $(ARGUMENTS)

# --- Set-up ---------------------------------------------------------------------------------------

# A machine with an NVIDIA driver gets JAX with CUDA as well.
GROUPS_ := --group dev $(if $(shell command -v nvidia-smi),--group cuda)

$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(RUN)/python -m pip install --quiet --disable-pip-version-check $(GROUPS_)
	touch $@

build: $(VENV)/.ready
	$(RUN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(RUN)/ninja \
		-DPython_EXECUTABLE=$(RUN)/python -DFA4_JAX_JOBS=$(JOBS) --log-level=WARNING
	$(RUN)/cmake --build build/native --parallel $(JOBS)
	$(RUN)/cmake --install build/native --prefix . > /dev/null

# --- Housekeeping ---------------------------------------------------------------------------------

lint: $(VENV)/.ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright --pythonpath $(RUN)/python

format: $(VENV)/.ready
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

wheel: $(VENV)/.ready
	$(RUN)/python -m build --wheel --outdir dist .

clean:
	rm -rf build dist fa4_jax/_native
