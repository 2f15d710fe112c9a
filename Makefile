# make example   set up, then viral contigs called among host contigs, with the model that comes along
# make test      the gate: format, lint, types, tests (set-up included)

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: example test clean

example: $(VENV)/installed
	$(BIN)/virnucpro predict --input examples/contigs.fa --output-dir example-results --force
	@cut -f 1,4,5 example-results/predictions.tsv

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
	rm -rf $(VENV) example-results
