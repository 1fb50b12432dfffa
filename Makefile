# Every target installs what it needs into .venv; required are Python >= 3.11 with venv and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run report docs package first-hour test test-slow test-minimum faults lint format clean

CORE := $(addprefix tests/,aggregation algorithms backends cli data models optimizers penalties runs tasks training test_api.py test_config.py)
FLAT := runs/digits/fedavg-zeta0-seed0 runs/digits/fedavg-zeta0.15-seed0

run: $(VENV)/ready  ## on the embedded digits: FedAvg and FedSAM with and without MAN, three seeds; how flat two of them are
	$(BIN)/fedman sweep --preset digits algorithm=fedavg,fedsam zeta=0,0.15 seed=0,1,2 lr=0.05 rounds=30 --out runs/digits
	$(BIN)/fedman flatness $(FLAT) --top 1 --trace --landscape --points 21
	@echo 'next: make report'

report: $(VENV)/ready  ## tables and figures of the runs of `make run`
	$(BIN)/fedman report runs/digits --out runs/digits.html

docs: $(VENV)/ready-dev  ## the documents and an API reference as a site; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site . build/site
	@echo 'written to build/site/index.html'

package: $(VENV)/ready-dev  ## sdist and wheel in dist/, checked
	rm -rf dist
	$(BIN)/python -m build -q --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

first-hour: $(VENV)/first-hour  ## thirty actions of a new user in a fresh environment; writes docs/first-hour.md
	$(BIN)/python docs/first_hour.py $</bin/python

test: $(VENV)/ready-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(VENV)/ready-dev  ## what takes long: real clusters, builds of packages and documents
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

test-minimum: $(VENV)/minimum/ready  ## the core with the lowest versions of the dependencies that pyproject.toml allows
	$(VENV)/minimum/bin/python -m pytest -m "not slow" $(CORE)

faults: $(VENV)/ready-dev $(VENV)/audit  ## inject faults; ONLY="kill disk" selects sections
	$(BIN)/python -m faults $(ONLY)

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,docs,tensorboard,mlflow,wandb,flower]'
	touch $@

$(VENV)/minimum/ready: pyproject.toml $(VENV)/ready-dev  # UV_TORCH_BACKEND=cpu: a torch without CUDA
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(VENV)/minimum
	$(BIN)/uv pip install -q --python $(VENV)/minimum/bin/python --resolution lowest-direct -e '.[dev,tensorboard]'
	touch $@

$(VENV)/audit:  # pip-audit in its own environment, so that its packages are not among ours
	$(PYTHON) -m venv $@
	-$@/bin/pip install --disable-pip-version-check -q pip-audit

$(VENV)/first-hour: package  # fedman's wheel and its dependencies alone
	$(PYTHON) -m venv --clear $@
	$@/bin/pip install --disable-pip-version-check -q -c constraints.txt dist/*.whl
