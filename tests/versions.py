"""`make test-versions`: tests that depend on other packages, with their oldest and newest supported versions.

Each set of versions gets a separate virtual environment, which is removed afterwards: PyTorch for CUDA takes seven
gigabytes. Further requirements replace those of pyproject.toml: `python -m tests.versions newest torch==2.11.0`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).parent.parent
PYTEST = ("pytest", "hypothesis", "pytest-xdist")
SELECTION = (
    "tests/test_cli.py",
    "tests/test_discovery.py",
    "tests/commands/test_doctor.py",
    "tests/device/test_nvrtc.py",
    "tests/device/test_nvrtc_library.py",
    "tests/device/test_compilers.py",
    "tests/classify/test_images.py",
    "tests/engine/capture",
    "tests/engine/test_backend.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_file.py",
    "tests/engine/test_weight_guard.py",
    "tests/engine/training",
    "tests/ops/relu",
    "tests/report/test_html.py",
)
"""Tests of PyTorch's tracing, NVRTC, the command line, images, weight files, plots and templates."""
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[.*\])?>=(?P<floor>[\w.]+)")


def requirements(which: str, others: Iterable[str] = ()) -> list[str]:
    """Return what to install: `oldest` pins every floor of pyproject.toml, `newest` leaves the choice to pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    development = project["optional-dependencies"]["dev"]
    asked = [*project["dependencies"], *(each for each in development if each.startswith(PYTEST))]
    replaced = {_name(other) for other in others}
    found = []
    for requirement in asked:
        parts = _REQUIREMENT.fullmatch(requirement)
        if parts is None:
            raise ValueError(f"pyproject.toml: {requirement!r} is not of the form name>=version")
        if _name(requirement) not in replaced:
            found.append(f"{parts['name']}=={parts['floor']}" if which == "oldest" else requirement)
    return [*found, *others]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def run(which: str, others: Sequence[str], tests: Sequence[str]) -> int:
    """Install into a new environment, run the tests there, and return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix=f"escalade-{which}-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        subprocess.run([*install, *requirements(which, others)], check=True)
        # The package itself, for its entry points, without a build folder in the sources.
        subprocess.run([*install, "--no-deps", "--no-build-isolation", "setuptools>=77"], check=True)
        subprocess.run([*install, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "list"], check=True)
        variables = {**os.environ, "ESCALADE_CACHE_DIR": f"{folder}/kernels"}
        return subprocess.run(
            [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--seed", "1", *tests],
            cwd=ROOT,
            env=variables,
        ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("others", nargs="*", metavar="REQUIREMENT", help="such as torch==2.11.0")
    parser.add_argument("--tests", nargs="+", default=SELECTION, help="files, instead of the usual selection")
    options = parser.parse_args(arguments)
    return run(options.which, options.others, options.tests)


if __name__ == "__main__":
    sys.exit(main())
