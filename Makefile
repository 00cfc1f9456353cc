# Everything here works on a machine with only python3 (3.11 or later) and make.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check test-slow bundle clean

demo: $(VENV)/.demo-installed
	$(BIN)/ctx-compress demo

test: check
	$(BIN)/python -m pytest

check: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-slow: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m slow

# Remakes the shipped demo bundle from nothing.
bundle: $(VENV)/.dev-installed
	$(BIN)/ctx-compress train demo/teacher demo/teacher_2 demo/teacher_3 demo/teacher_4 demo/mean_pooling
	rm -rf ctx_compress_rag/demo/bundle
	cp -r runs/demo/mean_pooling/bundle ctx_compress_rag/demo/bundle

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache

# The stamps keep a second `make` from installing again; `dev` includes all that `demo` needs.
$(VENV)/.demo-installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev-installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $(VENV)/.demo-installed $@

$(BIN)/python:
	python3 -m venv $(VENV)
