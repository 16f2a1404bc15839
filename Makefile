# Everything runs from .venv, which each target makes when it is missing or older than what it is made from.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# uv leaves it to the first import to compile; where this is set, as in many containers, every import would anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all check protos format clean

# Serve the demo pair: three tiers, OpenAI-compatible HTTP on port 8000.
serve: $(INSTALLED)
	$(BIN)/triforce serve

# The quick tests, minutes: two files at a time.
test: $(INSTALLED)
	$(BIN)/pytest -m "not slow" -n 2

# All tests, one at a time: some of the slow ones measure.
test-all: $(INSTALLED)
	$(BIN)/pytest

# Style, types, layering, and whether generated code is fresh.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict triforce_core actors deploy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit/test_protos.py

# Generate triforce_core/_gen from protos/.
protos: $(INSTALLED)
	$(BIN)/python -m scripts.generate_protos

# Format, and mend what ruff can.
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Remove .venv, caches and build leftovers.
clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is older or missing; try: make PYTHON=python3.11" >&2; \
	    exit 1; }
	@echo 'Setting up .venv: a minute the first time, several where PyTorch comes with CUDA'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m scripts.install
	touch $@
