# make example   install, then find viruses in the example contigs and embed them with two workers
# make test      install, then check format, lint and types, and run the tests
# make lint      check format, lint and import contracts
# make docs      build the documentation site in site/html
# make release   build and check the release archives in dist/
# make coverage  the tests, and the share of the lines that they run
# make sanitize  test the C library with the address and undefined-behaviour sanitizers
# make pythons   try the installed program on every Python from 3.11 on that is here or can be had
#
# TORCH=cpu      install PyTorch without CUDA, from PyTorch's own index
# TORCH=default  install PyTorch from the package index. The default is `cpu` on Linux machines
#                without an NVIDIA GPU, and `default` elsewhere.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

CPU_BUILDS = https://download.pytorch.org/whl/cpu
NVIDIA = $(shell command -v nvidia-smi; ls /dev/nvidiactl 2>/dev/null)
TORCH ?= $(if $(filter Linux,$(shell uname -s)),$(if $(NVIDIA),default,cpu),default)

# Tests often wait for child processes, so there is one tester more than cores, but at most four.
TESTERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))

.PHONY: example test lint types tests coverage sanitize pythons docs release clean

# This first run writes the bytecode of all that it imports, even if Python is told to write none.
# Later runs then start in half the time.
example: $(VENV)/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/virnucpro predict --input examples/contigs.fa --output-dir example-results \
	    --model virnucpro-tiny --device cpu --workers 2 --force
	@cut -f 1,5,6 example-results/predictions.tsv

# One process checks types while the first tests run.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache

types: $(VENV)/installed-dev
	$(BIN)/mypy

tests: $(VENV)/compiled
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(TESTERS) --dist worksteal

# Slower than `make tests`, because every line is counted: not part of the gate.
coverage: $(VENV)/compiled
	$(BIN)/coverage erase
	$(BIN)/pytest -n $(TESTERS) --dist worksteal --cov=virnucpro --cov-report=
	$(BIN)/coverage combine --append --quiet
	$(BIN)/coverage report --skip-covered

sanitize: $(VENV)/installed-dev
	$(BIN)/python scripts/sanitize.py

# Environments are kept in .pythons/ and made again when the dependencies change.
pythons: $(VENV)/installed-dev
	$(BIN)/python scripts/check_pythons.py

# Compile what the tests import once, not in each tester and each process that it starts. An error
# in this step is reported when the tests themselves run.
$(VENV)/compiled: $(VENV)/installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq > /dev/null || true
	touch $@

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_site.py

release:
	PYTHON=$(PYTHON) packaging/release.sh

# Compiling every installed module would take minutes, and few are ever imported.
PIP_INSTALL = $(BIN)/pip install --quiet --no-compile -c constraints.txt

# On Linux, PyTorch from the package index includes CUDA: gigabytes that need a GPU.
$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(shell find virnucpro -name '*.[ch]')
	$(PYTHON) -m venv $(VENV)
	@if [ '$(TORCH)' = cpu ]; then \
	    echo 'PyTorch is installed without CUDA (TORCH=cpu, the default without an NVIDIA GPU).'; \
	    echo 'With CUDA: make clean example TORCH=default'; \
	    $(PIP_INSTALL) --retries 1 --timeout 15 --no-deps --index-url $(CPU_BUILDS) torch 2>/dev/null || \
	    echo 'PyTorch is not available from $(CPU_BUILDS). The build of the package index, which may include CUDA, is installed instead.'; \
	fi
	$(PIP_INSTALL) -e .
	touch $@

# The package is installed already. Only the packages of its extra are added.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) 'virnucpro[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pythons example-results
