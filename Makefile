# make demo                  answer a question with a real model, without and with speculative decoding
# make demo PROMPT='...'     the same with your own question
# make test                  run the test suite
# make lint                  look for mistakes in the sources, their type hints included
# make types                 check the type hints
# make docs                  build the API reference from the docstrings, into build/docs
# make clean                 remove what make built (downloaded models stay in your cache folder)
#
# Needs Python >= 3.11 and a network the first time; everything goes into .venv here and into your cache folder.

PYTHON := .venv/bin/python

# A prompt must arrive as it was typed. $(value) keeps make from reading its dollars, and the assignment makes that text the
# variable itself, since make would expand the one from its command line again when it hands it to the recipe's environment;
# there, the shell reads no quotes or backticks in it.
ifneq ($(origin PROMPT),undefined)
override PROMPT := $(value PROMPT)
export PROMPT
endif

.PHONY: help environment demo test lint types docs clean

help:
	@sed -n 's/^# make/make/p' Makefile

environment:
	@sh scripts/make_environment.sh

demo: environment
	@$(PYTHON) scripts/demo.py $(if $(filter-out undefined,$(origin PROMPT)),--prompt="$$PROMPT")

test: environment
	$(PYTHON) -m pytest --numprocesses=2 --dist=loadfile

lint: environment
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	@if command -v shellcheck >/dev/null; then shellcheck scripts/*.sh .ci/run; else echo "shellcheck is not here: shell scripts not checked"; fi

types: environment
	$(PYTHON) -m mypy

docs: environment
	@$(PYTHON) -c 'import pdoc' 2>/dev/null || $(PYTHON) -m pip install --quiet -e '.[docs]'
	$(PYTHON) scripts/make_docs.py build/docs

clean:
	@sh scripts/make_environment.sh --remove
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
