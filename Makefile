# `make test` and `make demo` work on a fresh clone with only Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: install test test-slow demo lint bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

demo: install
	$(BIN)/python examples/scaling_demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/cosimulation.py
	$(BIN)/python benchmarks/study.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/workloads.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: accuracy
accuracy: install
	$(BIN)/python -m accuracy.report
