# The virtual environment is made once and again whenever pyproject.toml changes.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check bench clean

demo: $(INSTALLED)
	$(BIN)/pipeline demo

test: $(INSTALLED) check
	$(BIN)/python -m pytest

bench: $(INSTALLED)
	$(BIN)/python -m tests.bench.bench_stream
	$(BIN)/python -m tests.bench.bench_training

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	# torch first and exactly, so that no other requirement picks another build of it.
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[torch,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
