# Two commands matter: `make demo` and `make test`. Each makes and fills .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
STAMP := $(VENV)/.filled

.PHONY: demo test lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a convnet and a GPT on the CPU under a simulated V100, and in less memory; prints reports"
	@echo "make test   lint, types, layers and all tests that need no GPU"
	@echo "make lint   ruff, mypy --strict, import-linter"
	@echo "make bench  the tables of the README that need no GPU; clock tables: make bench TABLES='a.csv b.csv'"

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kilter needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)" -e ".[dev,exact,top]"
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_names.py

bench: $(STAMP)
	$(BIN)/kilter bench faults
	$(BIN)/kilter bench harm
	$(BIN)/kilter bench harm --programs 2000
	$(BIN)/kilter bench memory
	$(BIN)/python benchmarks/hook_cost.py
	$(if $(TABLES),$(BIN)/kilter bench clocks --max-slowdown 5% --seeds 20 --table $(TABLES))
	$(if $(TABLES),$(BIN)/kilter bench clocks --aa --policies kilter --seeds 20 --table $(TABLES))

clean:
	rm -rf $(VENV) runs
