PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint bench setup

# Every target sets up first; where nothing changed that takes a moment.
setup:
	@$(PYTHON) requirements/install.py

train: setup
	@$(BIN)/python data/movielens.py
	$(BIN)/python -m recsys_offload.train configs/movielens.yaml

test: setup
	@$(BIN)/python data/movielens.py
	@$(BIN)/python data/open_bandit.py
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/data_loading.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/cached.py
	$(BIN)/python benchmarks/soak.py
