# Every target sets up what it needs: a fresh clone can start with any of them.
# The first Python of 3.11 or newer that runs here; PYTHON=/path/to/python names another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes, of which each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
# Tests of a file share what is slow to make, so they stay together.
AT_ONCE := --numprocesses 2 --dist loadfile --quiet

.PHONY: setup check test test-fast test-long test-gpu docs bench bench-gpu demo demo-rounds wheel

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(or $(PYTHON),false) -c '$(NEW_ENOUGH)' || \
		{ echo "align needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not,nothing on the PATH is)." \
		"Install it, or name one: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv/bench-ready: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

.venv/docs-ready: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: setup
	$(BIN)/pytest $(AT_ONCE) --durations 25 -m 'not long and not gpu'

test-fast: setup
	$(BIN)/pytest $(AT_ONCE) tests/unit -m 'not long and not gpu'

test-long: setup
	$(BIN)/pytest $(AT_ONCE) -m 'not gpu'

# The compiler of kernels leaves files of its helper processes open.
test-gpu: setup
	$(BIN)/pytest --quiet -m gpu -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

demo: setup
	rm -rf demo && mkdir demo
	$(BIN)/align tiny-world demo/world
	cp demo/world/data/paired.parquet demo/data.parquet
	printf 'model:\n  path: world/model\ntrain:\n  lr: 1e-3\n  eval_fraction: 0.1\n' > demo/align.yaml
	cd demo && ALIGN_HOME=. ../$(BIN)/align precompute-ref data.parquet
	cd demo && ../$(BIN)/align verify align-cache
	cd demo && ../$(BIN)/align inspect align-cache
	cd demo && ../$(BIN)/align sweep --method kto --method dpo --method orpo
	@echo
	@echo "Look next at demo/align-sweep/sweep.html, in any browser: it links to a page of every run."
	@echo "In demo/align-sweep/kto/: model/ (a Hugging Face folder), metrics.jsonl, config.yaml."
	@echo "Every run is in MLflow: $(BIN)/mlflow ui --backend-store-uri sqlite:///demo/mlflow.db"

# So small a model is faster with one thread.
demo-rounds: setup
	rm -rf demo-rounds && mkdir demo-rounds
	$(BIN)/align tiny-world demo-rounds/world
	cp examples/rounds.yaml demo-rounds
	cd demo-rounds && ALIGN_HOME=. OMP_NUM_THREADS=1 ../$(BIN)/align rounds rounds.yaml --method kto --output kto
	cd demo-rounds && ALIGN_HOME=. OMP_NUM_THREADS=1 ../$(BIN)/align rounds rounds.yaml --method dpo --output dpo
	@echo
	@echo "Each round is a training: look at demo-rounds/kto/round-003/run/report.html, in any browser."

bench: .venv/bench-ready
	$(BIN)/pytest tests/peers
	$(BIN)/python tests/bench/start.py
	$(BIN)/python tests/bench/reference.py
	$(BIN)/python tests/bench/data_plane.py
	$(BIN)/python tests/bench/train.py
	$(BIN)/python tests/bench/whole.py

# On a machine with one GPU; PARTS='small large/dpo' chooses.
bench-gpu: .venv/bench-ready
	$(BIN)/python tests/bench/gpu.py $(PARTS)

# A page without a place in the contents, a dead link or anchor, and any other warning is an error.
docs: .venv/docs-ready
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

wheel: setup
	rm -rf build dist
	$(BIN)/python -P -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
