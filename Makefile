# Everything a newcomer types. Each sets up first what it needs and is not there: what tests need as
# well is twice as large as what serving needs, and comes with `make test`.
VENV   ?= .venv
FLEET  ?= fleets/demo/fleet.yaml
JOBS   ?= 2
PORT   ?= 8000
EXTRAS ?=
PYTHON := $(VENV)/bin/python
# A file's tests in one process, files in the order of `tests/conftest.py`.
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder
READY  := $(VENV)/.ballast-ready
DEV    := $(VENV)/.ballast-ready-dev
REAL   := $(VENV)/.ballast-ready-demo

.PHONY: setup demo serve test coverage check docs bench wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   create $(VENV) and install what serving needs, and EXTRAS (cuda, otel, placement, demo, dev)"
	@echo "make demo    presets compared live, on equal terms: who keeps most service levels (four minutes)"
	@echo "make serve   serve FLEET (default $(FLEET)) over HTTP, at PORT (default $(PORT))"
	@echo "make test    run the tests but slow ones, in JOBS processes (default $(JOBS))"
	@echo "make coverage   the same, and which lines of ballast they ran (kernels and workers' processes apart)"
	@echo "make check   the gate: format, lint, types, import contracts, docs, all tests, README"
	@echo "make docs    the documentation as a site, under out/site"
	@echo "make wheel   build the wheel, install it into a fresh environment, and serve with it"
	@echo "make bench   the quick form of the benchmarks, results under out/"

setup:
	@VENV=$(VENV) scripts/setup $(EXTRAS)

$(READY): pyproject.toml scripts/constraints.txt
	@VENV=$(VENV) scripts/setup

$(DEV): pyproject.toml scripts/constraints.txt
	@VENV=$(VENV) scripts/setup dev

$(REAL): pyproject.toml scripts/constraints.txt
	@VENV=$(VENV) scripts/setup demo

demo: $(REAL)
	$(VENV)/bin/ballast demo

$(FLEET): | $(REAL)
	$(VENV)/bin/ballast fleet make $(dir $(FLEET))

serve: $(FLEET) $(READY)
	$(VENV)/bin/ballast serve $(FLEET) --port $(PORT)

test: $(DEV)
	$(PYTHON) -m pytest -q -m "not slow" $(SPREAD)

# Twice as slow as `make test`. Machine code and processes that tests start are not traced.
coverage: $(DEV)
	$(PYTHON) -m pytest -q -m "not slow" $(SPREAD) --cov ballast --cov-report term:skip-covered

check: $(DEV)
	@VENV=$(VENV) scripts/check $(SPREAD)

docs: $(DEV)
	$(PYTHON) -m mkdocs build --strict

bench: $(DEV)
	@mkdir -p out
	$(PYTHON) -m benchmarks.fleet --quick --json out/fleet.json

wheel:
	@$${BALLAST_PYTHON:-python3} scripts/try_wheel.py

clean:
	rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
