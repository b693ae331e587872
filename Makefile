# For visitors: `make install`, `make demo` and `make test`. Each makes the environment in $(VENV) that it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: help install demo test test-papers test-all quick style types examples docs site check lowest release-check upgrade-check clients format benchmarks clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/.demo  ## an environment in .venv for the commands of the README; other extras: pip install -e '.[...]'
	@echo 'Ready. Next: source $(BIN)/activate'

demo: $(VENV)/.demo  ## train, evaluate, index and search on the embedded emoji set; writes runs/demo/index.html
	$(BIN)/sfumato demo

TESTS := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev  ## the tests of the package that need no server and no patience, on as many processes as there are cores
	$(TESTS) tests -m 'not slow and not engine'

test-papers: $(VENV)/.dev  ## the tests of what repeats and studies the papers
	$(TESTS) papers/tests

test-all: test test-papers  ## all tests: also those with real servers and a browser, and the slow ones
	$(TESTS) tests -m 'slow or engine'

quick: style types  ## style, types and the tests of what changed since origin/main, in less than a minute
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile -m 'not slow and not engine' $$($(BIN)/python scripts/quick.py)

style: $(VENV)/.dev  ## ruff: rules and layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

examples: $(VENV)/.dev  ## run every Example in the docstrings
	$(BIN)/python -m pytest --doctest-modules src/sfumato papers --ignore papers/tests --ignore papers/benchmarks --ignore src/sfumato/adapters  # these need other packages

docs: $(VENV)/.dev  ## build the documentation site into build/site; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site: docs  ## the same and its demo page, a search in the browser; trains as `make demo` does if runs/demo has no model
	$(BIN)/python scripts/demo_page.py

check: style types examples docs test-all  ## what has to pass before a change lands

lowest:  ## a part of the tests with the lowest version of every dependency, in an environment of its own
	$(PYTHON) scripts/lowest_versions.py

release-check:  ## build sdist and wheel, and try the wheel in a new environment; needs a package index
	$(PYTHON) scripts/release_check.py

clients: $(VENV)/.dev  ## generate clients of the service in Python and TypeScript, and try them; needs Node.js and package indices
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m $$(grep -m 1 '^pip install openapi' docs/guides/serve.md) --quiet
	$$(grep -m 1 '^npm install openapi' docs/guides/serve.md) --silent --prefix build/clients
	$(BIN)/python -m pytest tests/serve/test_clients.py

upgrade-check:  ## read and change what COMMIT=... has made, and ask that commit again; needs a package index
	$(PYTHON) scripts/upgrade_check.py $(COMMIT)

format: $(VENV)/.dev  ## put the code into its one layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/.dev  ## speed and memory against the references, into benchmarks/results and the page "How fast is it?"
	$(BIN)/python benchmarks/suite.py

clean:  ## remove the environment and all runs
	rm -rf $(VENV) runs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo,report,serve]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[all,dev]'
	touch $@ $(VENV)/.demo
