# `make run` and `make test` install all they need into .venv; required are Python >= 3.11 with venv and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run report test test-slow faults lint format clean

run: $(VENV)/ready  ## on the embedded digits: FedAvg and FedDyn with and without MAN, three seeds
	$(BIN)/fedman sweep --preset digits algorithm=fedavg,feddyn zeta=0,0.05 seed=0,1,2 --out runs/digits

report: $(VENV)/ready  ## tables and figures of the runs of `make run`
	$(BIN)/fedman report runs/digits --out runs/digits.html

test: $(VENV)/ready-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(VENV)/ready-dev  ## what takes long: real clusters, builds of packages and documents
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow

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
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,tensorboard,flower]'
	touch $@

$(VENV)/audit:  # pip-audit in its own environment, so that its packages are not among ours
	$(PYTHON) -m venv $@
	-$@/bin/pip install --disable-pip-version-check -q pip-audit
