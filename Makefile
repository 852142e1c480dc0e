# Two commands do everything: `make demo` and `make test`. Both install into .venv first; a second run reuses it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help install demo test lint types unit browser clean

help:
	@echo "make demo   install into .venv, run the whole path on real tissue (about 10 minutes on two cores)"
	@echo "make test   install into .venv, lint, type-check and run every test"

$(INSTALLED): requirements.lock pyproject.toml
	@echo "== Installing wsi-mil into .venv (5 to 15 minutes and about 7 GB the first time, mostly torch, with nothing to see; seconds afterwards)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

install: $(INSTALLED)

demo: install
	@echo "== Running the demo: 40 slides composed from real tissue, five methods, one real scan from outside"
	$(BIN)/wsi-mil demo --out demo --command $(BIN)/wsi-mil

# The browser tests drive the system's Chromium; on Debian and Ubuntu it is installed here when we may.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { \
		echo "== Installing Chromium for the browser tests"; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
		else echo "Chromium is missing: install it (Debian: sudo apt-get install chromium)"; exit 1; fi; }

lint: install
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	@echo "== mypy"
	$(BIN)/mypy

unit: install browser
	@echo "== pytest"
	$(BIN)/python -m pytest --durations=15

test: install lint types unit
	@echo "== All green"

clean:
	rm -rf .venv demo build dist *.egg-info
