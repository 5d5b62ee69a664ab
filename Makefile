# `make demo` and `make test` work from a clean clone: what they need is installed into .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test setup clean

demo: setup
	$(BIN)/escalade doctor
	$(BIN)/escalade ladder conv2d $(DEMO)

test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Escalade needs Python 3.11 or newer; name one with: make PYTHON=python3.11")'
	@command -v g++ >/dev/null || { echo "Escalade runs its kernels without a GPU by compiling them with g++, which is not here. Install g++ 12 or newer (Debian, Ubuntu: apt install g++)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
