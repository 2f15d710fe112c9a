# make example   set up, then find viruses in example contigs and embed them with two workers
# make test      the gate: format, lint, types, tests (set-up included)
# make lint      format, lint and import contracts alone
# make docs      the documentation as a site, in site/html
# make release   build and check the archives of a release, in dist/
# make sanitize  the tests of the C library with the address and undefined behaviour sanitizers
# make pythons   the installed program on every Python from 3.11 on that this machine has or can get
#
# TORCH=cpu      PyTorch without CUDA, from PyTorch's own index; TORCH=default: that of the package index.
#                Left out: cpu on Linux where there is no NVIDIA GPU, else default.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

CPU_BUILDS = https://download.pytorch.org/whl/cpu
NVIDIA = $(shell command -v nvidia-smi; ls /dev/nvidiactl 2>/dev/null)
TORCH ?= $(if $(filter Linux,$(shell uname -s)),$(if $(NVIDIA),default,cpu),default)

# Tests wait for processes that they start: one tester more than there are cores, four at most.
TESTERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))

.PHONY: example test lint types tests sanitize pythons docs release clean

# What this first run imports is compiled and kept, so that later ones start in half the time, even
# where Python is told to write no bytecode.
example: $(VENV)/installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/virnucpro predict --input examples/contigs.fa --output-dir example-results \
	    --model virnucpro-tiny --device cpu --workers 2 --force
	@cut -f 1,5,6 example-results/predictions.tsv

# Types are checked by one process, while the first tests run.
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

sanitize: $(VENV)/installed-dev
	$(BIN)/python scripts/sanitize.py

# Environments are kept in .pythons/, and made again when the dependencies change.
pythons: $(VENV)/installed-dev
	$(BIN)/python scripts/check_pythons.py

# What the tests import is compiled once, while types are checked, and not by each tester and each
# process that it starts. What finds a fault here is run again above, and reported there.
$(VENV)/compiled: $(VENV)/installed-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -qq > /dev/null || true
	touch $@

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_site.py

release:
	PYTHON=$(PYTHON) packaging/release.sh

# pip would compile all that it installs, of which little is ever imported.
PIP_INSTALL = $(BIN)/pip install --quiet --no-compile -c constraints.txt

# On Linux the PyTorch of the package index brings CUDA along, which is of no use without a GPU.
$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(shell find virnucpro -name '*.[ch]')
	$(PYTHON) -m venv $(VENV)
	@if [ '$(TORCH)' = cpu ]; then \
	    echo 'PyTorch without CUDA is installed, as on a machine without an NVIDIA GPU.'; \
	    echo 'With CUDA: make clean example TORCH=default'; \
	    $(PIP_INSTALL) --retries 1 --timeout 15 --no-deps --index-url $(CPU_BUILDS) torch 2>/dev/null || \
	    echo 'It could not be had from $(CPU_BUILDS): the build of the package index is installed, with CUDA if that has it.'; \
	fi
	$(PIP_INSTALL) -e .
	touch $@

# The package is there and is not built again: its extra alone is missing.
$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) 'virnucpro[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pythons example-results
