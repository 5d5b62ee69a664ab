"""The pages on adding an operation, a rung and a layer, followed literally in a copy of the library."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
STEP = re.compile(
    r"^(?P<words>New file|In) `(?P<file>[\w/.]+)`(?:, (?P<how>below|above|instead of) `(?P<line>[^`\n]+)`)?:\n\n?"
    r"```\w+\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PAGES = ("adding-an-operation.md", "adding-a-rung.md", "adding-a-layer.md")


def follow(page: pathlib.Path, root: pathlib.Path) -> None:
    steps = [*STEP.finditer(page.read_text())]
    assert steps, f"{page.name} has no steps"
    for step in steps:
        file = root / step["file"]
        if step["words"] == "New file":
            assert not file.exists(), f"{page.name}: {step['file']} exists"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step["code"])
            continue
        lines = file.read_text().splitlines(keepends=True)
        (at,) = [number for number, line in enumerate(lines) if line.strip() == step["line"]] or pytest.fail(
            f"{page.name}: {step['file']} has no line {step['line']!r}"
        )
        first = at + (step["how"] == "below")
        lines[first : at + (step["how"] != "above")] = [step["code"]]
        file.write_text("".join(lines))


def test_an_operation_a_rung_and_a_layer_are_added_as_documented(tmp_path: pathlib.Path) -> None:
    for package in ("escalade", "escalade_apps", "escalade_bench"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))

    def python(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "160"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for page in PAGES:
        follow(ROOT / "docs" / page, tmp_path)
    verified = python("-m", "escalade", "verify", "cumsum", "--device", "twin", "--checks")
    assert "naive" in verified and "warp_per_row" in verified and "all right" in verified
    layer = (ROOT / "docs" / PAGES[2]).read_text()
    (tried,) = re.findall(r"^```python\n(# Try it.*?)^```$", layer, re.DOTALL | re.MULTILINE)
    assert "warp_per_row" in python("-c", tried)  # our kernel, not PyTorch's
