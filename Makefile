# make demo   the whole pipeline on the example, with a random model (set-up included)
# make test   the gate: format, lint, types, tests (set-up included)

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test clean

demo: $(VENV)/installed
	$(BIN)/virnucpro demo demo
	$(BIN)/virnucpro predict --input examples/contigs.fa --output-dir demo/results --force \
	    --model demo/esm2_demo --head demo/head.safetensors
	@echo "The model and the head of this demo are RANDOM: its calls mean nothing."

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo
