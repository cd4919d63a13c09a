# Every target sets itself up: the stamps below stand for a virtual environment and what is in it.
#
#   make demo    a picture, a prompt and a camera path become a short video, on any CPU
#   make test    everything that a change must pass: format, lint, types, import layers, tests
#                RUN_LEVEL=advanced_model adds costly variants: other sizes, four ranks
#   make soak    the long-run tests (1000 chunks)
#   make train-smoke  a short training of the toy world, whose losses have to fall (2 minutes)
#   make cases CASES=DIR   runs each DIR/*/run.py, a script that shows a fault, against this checkout
#   make mutants the tests of the tests: a fault at a time is put into a copy, and has to be caught
#   make serve-demo   a server with the toy world and its web page on 127.0.0.1:8000 (or PORT=...)
#   make test-web     the tests of the web page, in a headless Chromium of the system
#   make gpu-check    what is only counted elsewhere, measured on one GPU in 9 minutes
#   make docs         the documentation as a site in build/docs
#   make test-npu-sim the genuine torch_npu on a simulated runtime (gcc; an environment of its own)
#   make test-cuda    what a GPU would run, compiled for it by Triton, without a GPU (0.3 GB)
#   make test-ray     worker groups on a Ray cluster of two raylets; check-ray: lost machines, too
#   make test-vllm    the tests of the linears on vLLM, in an environment of their own (2.2 GB)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What running needs, and the tools of `make test` on top of it.
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# torch goes in first: the version that is tested, and by arguments of its own for pip, since the
# package index has one build for each platform. A torch that is there already stays. The first
# installation takes minutes, so pip shows its lines and bars.
TORCH ?= torch==2.13.0
TORCH_PIP ?=
TORCH_SIZE := on Linux the CUDA build, 2.7 GB; README.md names a smaller one
# Two test processes of one thread each: the tests' small matrices gain nothing from more.
WORKERS ?= 2
RUN_LEVEL ?= core_model
PORT ?= 8000
# vLLM pins other versions than the project runs with, so it has a folder of its own.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# torch_npu must never be installed beside the torch that everything else is tested with.
NPU_SIM_VENV ?= .venv-npu-sim
NPU_SIM_STAMP := $(NPU_SIM_VENV)/.installed
# Triton, which torch has on CUDA alone, beside what the tests' own environment holds.
CUDA_VENV ?= .venv-triton
CUDA_STAMP := $(CUDA_VENV)/.installed
# Ray and what it needs, beside what the tests' own environment holds.
RAY_VENV ?= .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed
# Two threads that wait for each other by spinning take both cores from everything else.
export OMP_NUM_THREADS = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: setup demo test check static unit soak mutants serve-demo test-web vllm-env test-vllm clean
.PHONY: gpu-check train-smoke cases npu-sim-env test-npu-sim cuda-env test-cuda ray-env test-ray check-ray docs

setup: $(DEV_STAMP)

$(RUN_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip show --quiet torch 2>/dev/null || \
	  { echo "Downloading $(TORCH) into $(VENV) ($(or $(TORCH_PIP),$(TORCH_SIZE)))"; \
	    $(BIN)/python -m pip install $(TORCH_PIP) "$(TORCH)"; }
	@echo "Installing this package and what it needs, about 0.4 GB beside torch"
	$(BIN)/python -m pip install --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

demo: $(RUN_STAMP)
	$(BIN)/vllm-omni demo --out build/demo

test: static unit

check: test

static: $(DEV_STAMP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache
	$(BIN)/basedpyright

unit: $(DEV_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --run-level $(RUN_LEVEL)

soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak -s --timeout 3600

train-smoke: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak tests/tools/toy_world

cases: $(DEV_STAMP)
	@test -n "$(CASES)" || { echo "name the folder of the cases: make cases CASES=DIR"; exit 1; }
	$(BIN)/python -m tests.run_cases $(CASES)

mutants: $(DEV_STAMP)
	$(BIN)/python -m tests.mutants

serve-demo: $(RUN_STAMP)
	@echo "The page will be at http://127.0.0.1:$(PORT)/ in a few seconds: an island, three times of day."
	$(BIN)/vllm-omni serve toy_world --omni --host 127.0.0.1 --port $(PORT) --deploy-config cpu_tiny.yaml

test-web: $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dev,web-test]'
	$(BIN)/python -m pytest tests/web

docs: $(RUN_STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/docs/index.html; it needs no server and no network."

# No stamp: on the machine of a GPU the python at hand may be all there is.
GPU_CHECK ?= --minutes 9 --out gpu_check.jsonl
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.lingbot_world.gpu_check $(GPU_CHECK)

# The list is complete and frozen; what vLLM asks for beyond it does not load here, see the list.
vllm-env: $(VLLM_STAMP)

$(VLLM_STAMP): tests/vllm/requirements.txt pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-vllm: $(VLLM_STAMP)
	VLLM_LOGGING_LEVEL=WARNING $(VLLM_VENV)/bin/python -m pytest tests/vllm

npu-sim-env: $(NPU_SIM_STAMP)

# torch must not look for torch_npu by itself: without the simulated runtime it cannot be loaded.
$(NPU_SIM_STAMP): export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
$(NPU_SIM_STAMP): tests/npu_sim/requirements.txt pyproject.toml
	command -v gcc >/dev/null && command -v nm >/dev/null
	test -x $(NPU_SIM_VENV)/bin/python || $(PYTHON) -m venv $(NPU_SIM_VENV)
	$(NPU_SIM_VENV)/bin/python -m pip install --quiet -r tests/npu_sim/requirements.txt --editable .
	@touch $@

# Eight ranks on two cores take three minutes: `make test-npu-sim NPU_SIM=` runs them, too.
NPU_SIM ?= -m 'not soak'
test-npu-sim: export TORCH_DEVICE_BACKEND_AUTOLOAD = 0
test-npu-sim: $(NPU_SIM_STAMP)
	$(NPU_SIM_VENV)/bin/python -m pytest tests/npu_sim/lane --noconftest -W default $(NPU_SIM) \
	  -p tests.helpers.fixtures.retries \
	  -o python_files='check_*.py'

# What the tests' own environment holds is found from a second one, which adds a few packages.
LOOK_INTO_VENV = -c 'import sysconfig, pathlib as p; \
  (p.Path(sysconfig.get_path("purelib")) / "project.pth").write_text( \
  "import site; site.addsitedir(%r)" % str(next(p.Path("$(VENV)").absolute().glob("lib/python*/site-packages"))))'

cuda-env: $(CUDA_STAMP)

$(CUDA_STAMP): tests/triton_lane/requirements.txt $(DEV_STAMP)
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps -r tests/triton_lane/requirements.txt
	$(CUDA_VENV)/bin/python $(LOOK_INTO_VENV)
	@touch $@

test-cuda: $(CUDA_STAMP)
	$(CUDA_VENV)/bin/python -m pytest tests/triton_lane --noconftest -W default -o addopts= \
	  -p tests.helpers.fixtures.retries \
	  -o python_files='check_*.py'

ray-env: $(RAY_STAMP)

$(RAY_STAMP): tests/ray/requirements.txt $(DEV_STAMP)
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python $(LOOK_INTO_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet -r tests/ray/requirements.txt
	@touch $@

# On Ray alone what `make test` runs on processes: the battery of executors, and whole servers.
RAY_PYTEST = $(RAY_VENV)/bin/python -m pytest -W default -k ray --run-level advanced_model \
  -o python_files='test_*.py check_*.py'
test-ray check-ray: export RAY_USAGE_STATS_ENABLED = 0
test-ray: $(RAY_STAMP)
	$(RAY_PYTEST) tests/diffusion/executor/test_executors.py \
	  'tests/diffusion/executor/test_groups.py::test_a_killed_rank_is_named_and_a_new_group_is_right[ray-0]' \
	  tests/entrypoints/server/test_several_ranks.py tests/entrypoints/server/test_drain.py \
	  tests/ray/check_token.py::test_on_ray_an_address_where_nobody_answers_is_refused_at_once

# All that runs on both, and lost machines, a frozen one, a lost head, overhead: takes longer.
check-ray: $(RAY_STAMP)
	$(RAY_PYTEST) -s tests/diffusion/executor tests/entrypoints/server/test_several_ranks.py \
	  tests/entrypoints/server/test_drain.py tests/ray

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
