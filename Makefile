# make demo, make test: each works on a fresh clone with Python 3.10+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-thorough lint format bench bench-quick dist clean

# torch first and pinned: with no torch there, an open range would fetch gigabytes of CUDA
$(INSTALLED): pyproject.toml requirements/constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c requirements/constraints.txt torch
	$(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[demo,test,bench]' ruff mypy
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m pure_loopgrad

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

test-thorough: $(INSTALLED)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

bench-quick: $(INSTALLED)
	$(BIN)/python -m benchmarks --quick

dist: $(INSTALLED)
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist build demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
