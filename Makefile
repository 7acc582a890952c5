# The two commands: `make train` and `make test`. Both set everything up in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup train test lint types bench-schedule clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fivefold needs Python 3.11 or newer: set PYTHON=/path/to/python"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

# Training comes with a later version; until then this draws what a pipeline schedule does.
train: setup
	$(BIN)/fivefold schedule 1f1b --stages 4 --microbatches 8
	$(BIN)/fivefold schedule zb-v --stages 4 --microbatches 8

test: setup lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .

types: setup
	$(BIN)/pyright

bench-schedule: setup
	$(BIN)/python benchmarks/schedule.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
