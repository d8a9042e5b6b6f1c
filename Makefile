# Everything a newcomer types. `make test` and `make demo` set up first where nothing is set up.
VENV   ?= .venv
FLEET  ?= fleets/demo/fleet.yaml
JOBS   ?= 2
PYTHON := $(VENV)/bin/python
READY  := $(VENV)/.ballast-ready

.PHONY: setup demo serve test check docs bench clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   create $(VENV) and install everything (quick the second time)"
	@echo "make demo    presets compared live, on equal terms: who keeps most service levels (4 minutes)"
	@echo "make serve   serve FLEET (default $(FLEET)) over HTTP"
	@echo "make test    run the tests but slow ones, in JOBS processes (default $(JOBS))"
	@echo "make check   the gate: format, lint, types, import contracts, docs, all tests, README"
	@echo "make docs    the documentation as a site, under out/site"
	@echo "make bench   the quick form of the benchmarks, results under out/"

setup:
	@VENV=$(VENV) scripts/setup

$(READY): pyproject.toml scripts/constraints.txt
	@VENV=$(VENV) scripts/setup

demo: $(READY)
	$(VENV)/bin/ballast demo

$(FLEET): | $(READY)
	$(VENV)/bin/ballast fleet make $(dir $(FLEET))

serve: $(READY) $(FLEET)
	$(VENV)/bin/ballast serve $(FLEET)

test: $(READY)
	$(PYTHON) -m pytest -q -m "not slow" -n $(JOBS) --dist loadfile

check: $(READY)
	@VENV=$(VENV) scripts/check -n $(JOBS) --dist loadfile

docs: $(READY)
	$(PYTHON) -m mkdocs build --strict

bench: $(READY)
	@mkdir -p out
	$(PYTHON) -m benchmarks.fleet --quick --json out/fleet.json

clean:
	rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
