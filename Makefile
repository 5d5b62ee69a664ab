# `make demo` and `make test` work from a clean clone: what they need is installed into .venv first.
PYTHON ?= python3
BIN := .venv/bin
# Of the tests' random inputs: the same every time. `pytest` by itself draws new ones.
SEED ?= 1
READY := .venv/.ready
RESULTS ?= results
# Chooses among cases that are alike: others every day, and all of them within a week. Repeat a day with DATE=...
DATE ?= $(shell date -u +%F)
VERSIONS ?= oldest newest
# For what needs nothing installed: PYTHON if it is given, else that of .venv if there is one.
HERE = $(if $(filter-out file default undefined,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

.PHONY: demo test types suite docs wheel notes test-slice test-versions gpu-test release-check setup clean

# Without a GPU the kernels run on the twin, on the CPU: a small problem, and ResNet-18 on small images.
demo: setup
	$(BIN)/escalade demo

test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --no-print-directory -j2 types suite

# In what the tests leave of two processors: these are the longer of the two by far.
types:
	nice $(BIN)/mypy

# A worker that is done takes tests from the other: they take from a millisecond to many seconds. Some start a Python of
# their own: what one compiles of our modules is there for the next, whatever the caller's environment says.
suite: export PYTHONDONTWRITEBYTECODE =
suite:
	$(BIN)/pytest -n 2 --dist worksteal --seed $(SEED) --sample $(DATE)

# Installs one extra of pyproject.toml into .venv without the package itself, and so without PyTorch.
EXTRA = import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
define install-extra
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c '$(EXTRA)' $(1) | $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r /dev/stdin
endef

# The documentation as a site in build/site. A broken link, anchor or docstring fails the build.
docs:
	$(call install-extra,docs)
	$(BIN)/python -m mkdocs build --strict

# A wheel and a source archive in dist, checked as a package index would check them.
wheel:
	$(call install-extra,release)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# The changelog's section of a version, as the notes of its release.
notes:
	@awk -v v='$(VERSION)' 'index($$0, "## [" v "]") == 1 { on = 1; next } /^## |^\[/ { on = 0 } on' CHANGELOG.md

# Three minutes of other configs and variants than `test` runs, which the date chooses, and the cases of the next day.
test-slice: setup
	$(BIN)/python -m tests.slice --date $(DATE)
	$(BIN)/pytest -n 2 --dist worksteal -m share --seed $(SEED) --sample $(shell date -u -d '$(DATE) +1 day' +%F)

# What depends on other packages, with the oldest and the newest versions of them that pyproject.toml allows. Each
# downloads PyTorch for CUDA into an environment of its own, which takes seven gigabytes until the tests are done.
test-versions:
	set -e; for which in $(VERSIONS); do $(PYTHON) -m tests.versions $$which; done

# On a machine with a GPU: its tests, and every kernel source under compute-sanitizer. Takes up to nine minutes.
gpu-test:
	$(HERE) -m tests.gpu.gate --results $(RESULTS) --seed $(SEED)

# Fails until every headline figure is current and every page shows it. Plans torchvision's networks, so it installs
# torchvision; needs no GPU, and takes some ten minutes.
release-check: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt torchvision
	$(BIN)/escalade measure headline --check
	$(BIN)/escalade report tables --check

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Escalade needs Python 3.11 or newer; name one with: make PYTHON=python3.11")'
	@command -v g++ >/dev/null || { echo "Escalade runs its kernels without a GPU by compiling them with g++, which is not here. Install g++ 12 or newer (Debian, Ubuntu: apt install g++)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .cache build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
