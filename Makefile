# `make demo` and `make test` each work as the first command on a fresh machine: they install what is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
# Spinning OpenMP threads cost up to 15x on a shared CPU.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1

.PHONY: install demo test check test-parity reliability wheel-smoke bench bench-storage bench-train schemas clean

install: $(VENV)/.installed

# torch first and pinned: resolved by another package it would be the newest build with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/hiddenstore demo hiddenstore-demo

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every kill, crash point and damaged byte, at length; figures in benchmarks/results.
reliability: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" tests/reliability

# Numbers against installed peers, in an environment of their own (their pins differ from ours).
test-parity: $(VENV)-parity/.installed
	OMP_NUM_THREADS=1 $(VENV)-parity/bin/python -m pytest -q -m parity tests/parity

$(VENV)-parity/.installed: tests/parity/requirements.txt tests/parity/requirements-no-deps.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check -r tests/parity/requirements.txt
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/parity/requirements-no-deps.txt
	touch $@

# A wheel, alone in an empty environment, used from another folder.
wheel-smoke: install
	sh tests/wheel_smoke.sh $(PYTHON) $(BIN)

schemas: install
	$(BIN)/python -m schemas.generate

bench: install
	$(BIN)/python benchmarks/storage_codecs.py
	$(BIN)/python benchmarks/collect_overhead.py
	$(BIN)/python benchmarks/trainer_memory.py

# Size, read and write beside the formats others use, in an environment of their own; about ten minutes.
bench-storage: $(VENV)-bench/.installed
	OMP_NUM_THREADS=1 $(VENV)-bench/bin/python -m benchmarks.storage

$(VENV)-bench/.installed: benchmarks/requirements-storage.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt -r benchmarks/requirements-storage.txt
	touch $@

# A training step beside the peers' own, its growth and memory; about ten minutes. Peers live where test-parity has them.
bench-train: install $(VENV)-parity/.bench-train
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.train

$(VENV)-parity/.bench-train: benchmarks/requirements-train.txt $(VENV)-parity/.installed
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/requirements-train.txt
	touch $@

clean:
	rm -rf dist build hiddenstore-demo .pytest_cache .mypy_cache .ruff_cache
