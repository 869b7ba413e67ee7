# make demo, make test: each works on a fresh clone with Python 3.10+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-thorough lint format docs figures examples bench bench-quick dist clean

# torch first and pinned: with no torch there, an open range would fetch gigabytes of CUDA
$(INSTALLED): pyproject.toml requirements/constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c requirements/constraints.txt torch
	$(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m pure_loopgrad

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-thorough: $(INSTALLED)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 --dist worksteal

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

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

figures: $(INSTALLED)
	$(BIN)/python docs/figures.py

examples: $(INSTALLED)
	for file in examples/*.py; do $(BIN)/python $$file || exit 1; done

# builds, then installs the wheel into an empty environment and runs the main job from it
dist: $(INSTALLED)
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --quiet
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install -q -c requirements/constraints.txt torch
	build/wheel-venv/bin/python -m pip install -q -c requirements/constraints.txt "$$(ls dist/*.whl)[demo]"
	cd build && wheel-venv/bin/python -m pure_loopgrad --quick --out wheel-output

clean:
	rm -rf $(VENV) dist build site demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
