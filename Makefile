# make demo | test | check | fuzz | chaos | serve | test-clients | test-image | test-vllm | bench | bench-peers | bench-overload | setup | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
FUZZ_SECONDS ?= 15

.PHONY: demo test check fuzz chaos serve test-clients test-image test-vllm bench bench-compare bench-peers bench-vllm bench-overload setup docs clean

demo: setup  ## see it work: two real engines, two tiny models, the gateway
	$(BIN)/relaygen demo $(ARGS)

test: setup  ## everything but vLLM, on real llama.cpp engines
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

check: setup  ## format, lint, types, import rule, the core's tests at full branch coverage
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/relaygen --cov --cov-report=term-missing

fuzz: setup  ## made-up input for FUZZ_SECONDS a part; FUZZ_SEED=n replays a run
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest -n 2 --dist load -m fuzz --show-capture=no tests/fuzz $(ARGS)

serve: setup  ## the gateway; e.g. make serve ARGS="--large http://gpu1:8000/v1 --small http://gpu2:8000/v1"
	$(BIN)/relaygen serve $(ARGS)

chaos: setup  ## many generations while their engines break: none may be lost (minutes)
	$(BIN)/pytest -m chaos -s tests/chaos $(ARGS)

test-clients: setup  ## other clients' SDKs against the gateway (1.4 GB to install)
	$(PYTHON) tests/clients/install.py .venv-clients
	$(BIN)/pytest -m clients tests/clients $(ARGS)

test-image: setup  ## the Dockerfile's steps in a folder, where there is no Docker (minutes)
	$(BIN)/pytest -m image tests/deploy $(ARGS)

test-vllm: setup  ## the seam on real vLLM servers (CPU build, about 4 GB to install), then bench-vllm
	$(PYTHON) tests/integration/install_vllm.py .venv-vllm
	$(BIN)/pytest -m vllm -s tests/integration $(ARGS)
	$(BIN)/python benchmarks/relay_on_vllm.py

bench: setup  ## what the gateway costs, on simulated engines (minutes; ARGS=--quick: one)
	$(BIN)/relaygen bench $(ARGS)

bench-compare: setup  ## the same against benchmarks/base.json: fails where it became slower
	$(BIN)/python benchmarks/compare.py $(ARGS)

bench-peers: setup  ## the same stream through nginx, LiteLLM and SGLang's router (1 GB to install)
	$(BIN)/python benchmarks/peers.py $(ARGS)

bench-vllm: setup  ## large, small and relay on two real vLLM servers, in one run
	$(PYTHON) tests/integration/install_vllm.py .venv-vllm
	$(BIN)/python benchmarks/relay_on_vllm.py $(ARGS)

bench-overload: setup  ## five times the clients that limits.generations allows, against as many as it does
	$(BIN)/python benchmarks/overload.py $(ARGS)

setup: $(VENV)/.installed  ## the virtual environment with the project, its demo and its tests

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and 'Python 3.11 or newer is needed, this is %d.%d: make PYTHON=python3.x' % v[:2])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,test]'
	touch $@

docs: setup  ## writes the generated parts of docs/
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .cache .venv-clients .venv-peers .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
