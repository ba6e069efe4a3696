# `make test` and `make demo` work on a fresh clone with only Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported; to compile all of them takes longer than all else of installing.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# So what is imported must be kept, or every process compiles all of it again: 4 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test test-slow package wheel demo lint docs bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/.installed-slow: $(VENV)/.installed
	$(PIP) --editable '.[dev,test-slow]'
	touch $@

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed-slow
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

# Builds wheel and source distribution, and installs and uses them outside of the checkout.
package: install
	$(BIN)/python -m pytest tests/package/distribution.py

# With the kernels as machine code, for Linux on x86-64; `pip wheel .` alone makes a pure one.
wheel: install
	DDLSIM_PRECOMPILE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

demo: install
	$(BIN)/python examples/scaling_demo.py

# Types are checked with what optional parts import, too.
lint: $(VENV)/.installed-slow
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, into out/site; then its links are checked, and a Chromium looks at it if one is installed.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py
	$(BIN)/python -m pytest --quiet docs/site

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@

bench: install
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/cosimulation.py
	$(BIN)/python benchmarks/study.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/workloads.py
	$(BIN)/python benchmarks/start_up.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: accuracy
accuracy: install
	$(BIN)/python -m accuracy.report
