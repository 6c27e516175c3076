# Every target sets up what it needs in .venv. PYTHON chooses the interpreter it is made from: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Without a GPU a known pair of wheels; with one, the torch that is there, or the newest in the range of pyproject.toml.
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.7.1
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Where packages lie: $(PYTHON) may be of a virtual environment itself, whose packages --system-site-packages leaves out.
SITE   := import sysconfig; print(sysconfig.get_path("purelib"))
# The tests start some hundred processes: where this is set, each would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
HAS_GPU := $(shell if nvidia-smi -L 2>/dev/null | grep -q GPU || [ -e /dev/kfd ]; then echo 1; fi)

# Workers of pytest-xdist, each with up to six ranks of one thread: on two cores three leave less idle than two. 0: one test after the other
# in pytest itself, as --pdb needs, and where there is a GPU: a second worker would set up ranks on the same GPUs.
WORKERS ?= $(if $(HAS_GPU),0,3)
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Versions of Triton that the CPU backend is tested with, each in an environment of its own.
TRITONS ?= 3.6.0 3.7.1 3.9.0
MATRIX  := .venv-triton

.PHONY: help install demo test lint test-gpu test-triton-matrix clean
.DELETE_ON_ERROR:

help:
	@echo "make install    set up $(VENV)"
	@echo "make demo       train a small Llama-style model on 4 ranks, with and without the extension"
	@echo "make test       lint, then all tests (those that need a GPU only where there is one)"
	@echo "make lint       ruff and mypy"
	@echo "make test-gpu   only the tests that need a GPU"
	@echo "make test-triton-matrix   tests of the CPU backend with Triton $(TRITONS)"
	@echo "make clean      remove $(VENV) and caches"

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed; choose one with: make install PYTHON=python3.12" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ is needed (Inductor compiles with it): install g++" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is needed (on Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }
ifdef HAS_GPU
	@if $(PYTHON) -c 'import sys, torch; v = torch.__version__.split("."); sys.exit((int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null; \
	then echo "[1/3] $(VENV) with the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	$(PYTHON) -c '$(SITE)' > "$$($(BIN)/python -c '$(SITE)')/parent.pth"; \
	else echo "[1/3] $(VENV)"; $(PYTHON) -m venv $(VENV); fi
	@echo "[2/3] torch and triton"
	@$(PIP) "torch>=2.11,<2.16" "triton>=3.6,<4"
else
	@echo "[1/3] $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(TORCH), $(TRITON)"
	@$(PIP) "$(TORCH)"
	@$(PIP) "$(TRITON)"
endif
	@echo "[3/3] torch_triton_dist and its tools"
	@$(PIP) -e ".[test,lint,demo]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m torch_triton_dist demo $(ARGS)

test: lint
ifdef HAS_GPU
	@$(PYTEST) $(ARGS)
else
	@echo "no GPU here: tests marked gpu are left out"
	@$(PYTEST) -m "not gpu" $(ARGS)
endif

lint: $(STAMP)
	@echo "ruff"
	@$(BIN)/python -m ruff check .
	@echo "mypy"
	@$(BIN)/python -m mypy torch_triton_dist

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu $(ARGS)

# Every version is tested, also after one that fails; GPUs are hidden. pip may warn that torch asks for another Triton: as intended.
test-triton-matrix: $(TRITONS:%=$(MATRIX)/%/.installed)
	@failed=""; \
	for version in $(TRITONS); do \
	    echo "Triton $$version"; \
	    CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= $(MATRIX)/$$version/bin/python -m pytest tests/cpu_backend $(ARGS) || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed with Triton$$failed" >&2; exit 1; fi

$(MATRIX)/%/.installed: pyproject.toml Makefile
	@echo "$(MATRIX)/$* with $(TORCH), triton==$*"
	@$(PYTHON) -m venv $(MATRIX)/$*
	@$(MATRIX)/$*/bin/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	@$(MATRIX)/$*/bin/python -m pip --disable-pip-version-check install --quiet "triton==$*"
	@$(MATRIX)/$*/bin/python -m pip --disable-pip-version-check install --quiet -e ".[test]"
	@test "$$($(MATRIX)/$*/bin/python -c 'import triton; print(triton.__version__)')" = "$*"
	@touch $@

clean:
	@rm -rf $(VENV) $(MATRIX) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
