# `make help` lists the targets. PYTHON= chooses the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
OUT ?= out

.DEFAULT_GOAL := help
.PHONY: help setup check format schemas test sweep demo assets clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Make .venv with everything: export, rtx and dev extras

# torch first: its wheel decides which other wheels fit, and pip reports a failure of the largest download early.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: mcpc needs Python 3.11 or later; choose one with PYTHON=..."; exit 2; }
	test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -e ".[export,rtx,dev]"
	@touch "$(STAMP)"

check: $(STAMP) ## Linters, types, layers, schemas: about a minute
	"$(BIN)/ruff" check
	"$(BIN)/ruff" format --check
	"$(BIN)/mypy"
	"$(BIN)/lint-imports" --no-logo
	"$(BIN)/python" tools/make_schemas.py --check

format: $(STAMP) ## Format the sources and repair what the linter can
	"$(BIN)/ruff" check --fix
	"$(BIN)/ruff" format

schemas: $(STAMP) ## Write schemas/*.json from the types
	"$(BIN)/python" tools/make_schemas.py

test: $(STAMP) ## Run every test, as CI does: under 20 minutes on two cores
	"$(BIN)/python" -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -m "not sweep"

sweep: $(STAMP) ## Run the tests that take longer than CI has time for
	"$(BIN)/python" -m pytest -q -m sweep || test $$? -eq 5

demo: $(STAMP) ## Compile the two example models and compare them with PyTorch
	"$(BIN)/mcpc" compile examples/fashion-llava/compile.yaml -o "$(OUT)/demo/fashion-llava" --force
	"$(BIN)/mcpc" compile examples/fashion-clip/compile.yaml -o "$(OUT)/demo/fashion-clip" --force
	"$(BIN)/python" examples/compare_with_pytorch.py "$(OUT)/demo/fashion-llava" "$(OUT)/demo/fashion-clip"

assets: $(STAMP) ## Make the Whisper test checkpoint from a package (needs a package index)
	"$(BIN)/python" tools/make_assets.py --output assets

clean: ## Remove everything that was built, .venv included
	rm -rf "$(VENV)" "$(OUT)" build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
