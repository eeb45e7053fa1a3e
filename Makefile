# The two commands of this project: `make serve` and `make test`. Both are idempotent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint configs/constraints.txt

.PHONY: serve test lint clean

serve: $(VENV)/.runtime
	$(BIN)/moeserve serve embedded --ep 2

test: $(VENV)/.test
	$(BIN)/pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch goes first and pinned: resolved on its own, pip may choose a build with gigabytes of CUDA.
$(VENV)/.runtime: pyproject.toml configs/constraints.txt $(wildcard kernels/moeserve_kernels/csrc/*)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' configs/constraints.txt)
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
