# Each target makes .venv by itself; what is there keeps its interpreter. Another one gets an environment of its own:
# `make PYTHON=python3.12 VENV=.venv/3.12 ...`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
QUESTION ?=
UPSTREAM ?=
SUITE ?= deepspeed
RECIPES ?= lossless zeropp
UPSTREAM_ARGS ?=
PAIRS ?= 0.18.0:2.11.0 0.19.8:2.15.0

# No op of DeepSpeed is compiled at installation: this project needs none.
export DS_BUILD_OPS = 0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start many interpreters. Where images set this, each of them would compile the package anew, for half a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo rlhf-demo test test-quick test-compat test-upstream bench faults soak check docs dist format clean
help:
	@echo "make demo     train a small Llama three times: stock ZeRO-3, zeropp, zeropp-4bit; results in runs/demo"
	@echo "make rlhf-demo  SFT, reward model and PPO of a tiny model on tasks with exact answers; results in runs/rlhf-demo"
	@echo "make test     all tests; ZEROPP_FP8_TEST_FULL=1 make test: products of parameters in full too"
	@echo "make test-quick   the tests to run before every commit"
	@echo "make test-compat   parity with stock on the oldest DeepSpeed and torch, and on the newest; in runs/compat.json"
	@echo "make test-upstream UPSTREAM=/path/to/DeepSpeed   DeepSpeed's own ZeRO-3 tests with recipes; in runs/upstream"
	@echo "                SUITE=accelerate UPSTREAM=/path/to/accelerate   and transformers or trl: those libraries' tests"
	@echo "                SUITE=vllm UPSTREAM=/path/to/an/unpacked/wheel   weights handed to vLLM's own engines"
	@echo "                SUITE=torchtitan UPSTREAM=/path/to/it   its trainer with the collectives of fsdp2"
	@echo "make bench QUESTION=kernels   measure; the questions are the files of benchmarks/; results in runs/"
	@echo "make faults   one rank struck at every place of a job, for every recipe; results in runs/faults.json"
	@echo "make soak     thousands of steps of every recipe, and whether anything grows (nightly); in runs/soak.json"
	@echo "make check    ruff: lint and format; the documentation, built strictly"
	@echo "make docs     configuration page and tables of results anew, and the documentation; in build/docs"
	@echo "make dist     a wheel and an sdist, in dist"
	@echo "make format   let ruff reformat"
	@echo "make clean    remove .venv and caches"

demo: $(VENV)/.run
	$(BIN)/python examples/pretrain/demo.py $(DEMO_ARGS)

# Two ranks, whatever there is: the settings are for that many. With two GPUs or more on GPUs, else on the CPU.
rlhf-demo: $(VENV)/.run
	$(BIN)/python examples/rlhf/pipeline.py --settings examples/rlhf/demo.json --ranks 2 --nodes 2 --replace \
		--out runs/rlhf-demo $(DEMO_ARGS)

# Several files at once, one more than there are cores: ranks wait for each other, which leaves 7 to 13 % of the cores
# idle with one each. Each of the processes keeps two servers that have imported everything, 1 GB. With TEST_ARGS, for
# example TEST_ARGS="tests/formats/test_mx.py -k rceil", only these.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + os.cpu_count()))')
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ifeq ($(strip $(TEST_ARGS)),)
test: $(VENV)/.test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)
else
test: $(VENV)/.test
	$(BIN)/python -m pytest $(TEST_ARGS)
endif

# One process's tests, without the files that take two thirds of their time; and with ranks, one file or two for
# each thing they are about: collectives, every two parts together, units, bytes, checkpoints, refusals.
NOT_QUICK := compute/test_casts test_children compute/test_linear kernels/test_adamw_kernel house/test_options
NOT_QUICK += upstream/test_upstream_workers formats/test_conformance_kernels
RLHF_RANKS := rlhf rlhf_demo rlhf_dpo rlhf_grpo rlhf_runs
QUICK := libraries/test_environment parity/test_norm parity/test_pairs parity/test_reduction_order checkpoints/test_saving
QUICK += failures/test_topology engines/test_storage
test-quick: $(VENV)/.test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(QUICK:%=tests/system/%.py) tests/test_*.py \
		$(filter-out tests/gpu/ tests/system/,$(wildcard tests/*/)) examples/rlhf/tests \
		$(NOT_QUICK:%=--ignore=tests/%.py) $(RLHF_RANKS:%=--ignore=examples/rlhf/tests/test_%.py)

# DEEPSPEED:TORCH, the oldest and the newest of both; without a torch with that of .venv. torch comes as the index has it.
# Beside the oldest DeepSpeed are the lowest bounds of all else that setup.cfg bounds below.
test-compat: $(VENV)/.test
	$(BIN)/python -m benchmarks.compat $(PAIRS) --workers $(WORKERS) $(BENCH_ARGS)

# Nothing is fetched but what the tests need of pytest: before 8.4, where DeepSpeed's fixtures still are fixtures. It goes
# to a folder of its own. A GPU each rank; on the CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 make test-upstream ...
ifeq ($(SUITE),vllm)
test-upstream: $(VENV)/.test
	@test -n "$(UPSTREAM)" || { echo "say where a wheel of vLLM is unpacked: see tests/upstream/test_vllm.py"; exit 2; }
	UPSTREAM_VLLM="$(abspath $(UPSTREAM))" $(BIN)/python -m pytest tests/upstream/test_vllm.py
else ifeq ($(SUITE),torchtitan)
test-upstream: $(VENV)/.test
	@test -n "$(UPSTREAM)" || { echo "say where torchtitan is installed: see tests/upstream/test_torchtitan.py"; exit 2; }
	UPSTREAM_TORCHTITAN="$(abspath $(UPSTREAM))" $(BIN)/python -m pytest tests/upstream/test_torchtitan.py
else
test-upstream: $(VENV)/.upstream
	@test -n "$(UPSTREAM)" || { echo "say where $(SUITE) is checked out: make test-upstream UPSTREAM=/path"; exit 2; }
	PYTHONPATH=$(CURDIR)/$(VENV)/upstream PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/upstream/run_upstream.py \
		--suite $(SUITE) --upstream "$(UPSTREAM)" --recipes $(RECIPES) --out runs/upstream/$(SUITE) $(UPSTREAM_ARGS)
endif

# On GPUs, else small on the CPU. Two nodes are network namespaces: as root.
bench: $(VENV)/.bench
	@test -n "$(QUESTION)" || { echo "say which, a file of benchmarks/: make bench QUESTION=kernels"; exit 2; }
	$(BIN)/python -m benchmarks.$(QUESTION) $(BENCH_ARGS)

# On the CPU half an hour: `stop` waits for the process group. On two GPUs: BENCH_ARGS="--device cuda --margin 60".
faults: $(VENV)/.run
	$(BIN)/python -m benchmarks.faults --side-by-side 4 $(BENCH_ARGS)

# On the CPU, hours.
soak: $(VENV)/.run
	$(BIN)/python -m benchmarks.soak $(BENCH_ARGS)

check: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mkdocs build --strict --quiet

# A test says when the page is not what is printed here.
docs: $(VENV)/.lint $(VENV)/.run
	$(BIN)/python -m benchmarks.report.configuration > docs/configuration.new
	mv docs/configuration.new docs/configuration.md
	$(BIN)/python -m benchmarks.report
	$(BIN)/mkdocs build --strict

# A test builds both in the same way, installs the wheel into an environment of its own and trains there.
dist: $(VENV)/.lint
	$(BIN)/pip install --quiet -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info

# Stamps: what is installed, remade when a version or a dependency changes.
$(VENV)/.made: constraints.txt
	$(PYTHON) -c 'import sys; (3, 10) <= sys.version_info < (3, 14) or sys.exit("Python 3.10 to 3.13 is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.lint: $(VENV)/.made
	$(BIN)/pip install --quiet -c constraints.txt ruff mkdocs "mkdocstrings[python]"
	@touch $@

# torch by itself first, by its exact version: every later package is then content with the build that is there.
$(VENV)/.torch: $(VENV)/.made
	$(BIN)/pip install --progress-bar off -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.run: $(VENV)/.torch setup.cfg setup.py
	$(BIN)/pip install --progress-bar off -c constraints.txt -e ".[examples]"
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	$(BIN)/pip install --quiet -c constraints.txt pyroute2
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install --progress-bar off -c constraints.txt -e ".[examples,test,dev,rlhf,compare]"
	@touch $@

$(VENV)/.upstream: $(VENV)/.test
	$(BIN)/pip install --quiet --target $(VENV)/upstream --no-deps pytest==8.3.5 parameterized==0.9.0 pytest-datadir==1.9.0
	@touch $@
