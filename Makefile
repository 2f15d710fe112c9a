# make example   set up, then ESM-2 vectors of contigs by two workers, and calls of the viral ones
# make test      the gate: format, lint, types, tests (set-up included)
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

.PHONY: example test clean

example: $(VENV)/installed
	$(BIN)/virnucpro predict --input examples/contigs.fa --output-dir example-results \
	    --device cpu --workers 2 --force
	@cut -f 1,5,6 example-results/predictions.tsv

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m compileall -q virnucpro
	$(BIN)/pytest -n $(TESTERS) --dist worksteal

# On Linux the PyTorch of the package index brings CUDA along, which is of no use without a GPU.
$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py virnucpro/scorer/scorer.c
	$(PYTHON) -m venv $(VENV)
	@if [ '$(TORCH)' = cpu ]; then \
	    echo 'PyTorch without CUDA is installed, as on a machine without an NVIDIA GPU.'; \
	    echo 'With CUDA: make clean example TORCH=default'; \
	    $(BIN)/pip install --quiet --retries 1 --timeout 15 --no-deps -c constraints.txt \
	        --index-url $(CPU_BUILDS) torch 2>/dev/null || \
	    echo 'It could not be had from $(CPU_BUILDS): the build of the package index is installed, with CUDA if that has it.'; \
	fi
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) example-results
