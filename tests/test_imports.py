"""Folders import downwards only, there are no import cycles, and imports are at the top of a file."""

from __future__ import annotations

import pathlib

import pytest

from escalade.cli import COMMANDS
from tests.imports import Package, read

ROOT = pathlib.Path(__file__).parent.parent
OPERATIONS = tuple(
    f"escalade.ops.{path.stem}"
    for path in sorted((ROOT / "escalade" / "ops").iterdir())
    if (path.suffix == ".py" or (path / "__init__.py").is_file())
    and path.stem not in ("__init__", "autograd", "base", "choose", "calling", "expressions", "shared")
)
LAYERS = (
    tuple(
        f"escalade.{name}"
        for name in (
            "discovery",
            "errors",
            "files",
            "fork_server",
            "narrow_tables",
            "gc_pause",
            "interruption",
            "subprocesses",
            "parsing",
            "terminal_text",
            "version",
        )
    ),
    ("escalade.device",),
    ("escalade.ops.base",),
    ("escalade.ops.expressions",),
    ("escalade.ops.choose",),
    ("escalade.ops.calling",),
    ("escalade.ops.shared",),
    OPERATIONS,
    ("escalade.ops",),
    ("escalade.models",),
    ("escalade.engine.graph",),
    ("escalade.engine.nodes",),
    ("escalade.engine.capture", "escalade.engine.passes"),
    ("escalade.engine.plan",),
    ("escalade.engine",),
    ("escalade.tune",),
    ("escalade",),
    ("escalade_apps",),
    ("escalade_apps.classify",),
    ("escalade_apps.ray",),
    ("escalade_apps.train",),
    ("escalade_bench.zoo",),
    ("escalade_bench.measure",),
    ("escalade_bench.profile",),
    ("escalade_bench",),
    ("escalade_bench.report",),
    ("escalade.commands",),
    ("escalade.cli", "escalade.__main__"),
)
"""From the lowest to the highest: a module imports from its own layer and those below it."""
LATE_MODULES = {
    "escalade": "the public names come when they are first used: compiler processes and --help do without PyTorch",
    **{
        f"escalade.commands.{name}": "--help must not import PyTorch, which takes seconds"
        for name in (*COMMANDS.keys() - {"cache", "doctor"}, "options")
    },
    "escalade.commands.doctor": "what cannot be imported is what the doctor is asked about",
    "escalade.engine": "inference does without training steps",
    "escalade.engine.calibration_report": "few programs print tables, and Rich takes a tenth of all imports",
    "escalade.engine.capture.export": "torch.export takes seconds to load, and most models are captured without it",
    "escalade.engine.capture.joint": "as AOTAutograd, it takes seconds to load",
    "escalade.engine.capture.trace": "torch.export takes seconds to load, and most models are captured without it",
    "escalade.engine.programs": "few models come from files, whose readers import ours and safetensors",
    "escalade.engine.step_table": "few programs print tables, and Rich takes a tenth of all imports",
}
"""Modules that import others of the package inside functions, and why."""
LATE_PACKAGES = {
    "PIL": "few commands look at images",
    "cuda": "CUDA's bindings load the driver's libraries, which a machine without a GPU has not got",
    "jax": "it need not be installed",
    "matplotlib": "it takes a second to load",
    "rich": "few programs print tables or progress bars, and it takes a tenth of all imports",
    "onnx": "an extra, which only ONNX files need",
    "torch._dynamo": "it takes seconds to load",
    "torch._functorch": "it loads torch._dynamo",
    "torch._inductor": "it takes seconds to load",
    "torch.utils.tensorboard": "it takes a package that need not be installed",
}
"""Other packages that are imported inside functions, and why."""


@pytest.fixture(scope="module")
def escalade() -> Package:
    return read(*(ROOT / name for name in ("escalade", "escalade_apps", "escalade_bench")))


def test_folders_import_downwards_only(escalade: Package) -> None:
    found = escalade.upward(LAYERS)
    assert not found, "\n".join(map(str, found))


def test_no_modules_import_each_other_in_a_circle(escalade: Package) -> None:
    assert escalade.circles() == []


def test_imports_inside_functions_have_a_reason(escalade: Package) -> None:
    late = [each for each in escalade.imports if each.inside_function and each.importer not in LATE_MODULES]
    found = [each for each in late if not each.imported.startswith(tuple(LATE_PACKAGES))]
    assert not found, "\n".join(map(str, found))


def test_no_exception_is_left_over(escalade: Package) -> None:
    """Unused exceptions are removed from the lists."""
    late = [each for each in escalade.imports if each.inside_function]
    assert {each.importer for each in late} >= set(LATE_MODULES)
    for package in LATE_PACKAGES:
        assert any(each.imported.startswith(package) for each in late), package


# The checker itself, on a fake package

FLOORS = (("house.low",), ("house.high",), ("house",))


def made_up(folder: pathlib.Path, sources: dict[str, str]) -> Package:
    """A package `house` with two folders, and its modules by path."""
    for name, source in {"__init__": "", "low/__init__": "", "high/__init__": "", **sources}.items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return read(folder / "house")


@pytest.mark.parametrize(
    "source",
    [
        "from house.high import roof",
        "from house.high.roof import tiles",
        "import house.high.roof",
        "from ..high import roof",
        "def late():\n    from house.high import roof",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.high.roof import tiles",
    ],
)
def test_an_upward_import_is_found_anywhere(tmp_path: pathlib.Path, source: str) -> None:
    package = made_up(tmp_path, {"low/cellar": source, "high/roof": "from house.low import cellar"})
    (found,) = package.upward(FLOORS)
    assert (found.importer, found.imported) == ("house.low.cellar", "house.high.roof")
    assert found.inside_function == source.startswith("def")
    assert package.circles() == [["house.high.roof", "house.low.cellar"]]


def test_downward_and_internal_imports_are_allowed(tmp_path: pathlib.Path) -> None:
    package = made_up(
        tmp_path,
        {"low/cellar": "import os", "low/door": "from . import cellar", "high/roof": "import house.low"},
    )
    assert package.upward(FLOORS) == [] and package.circles() == []


def test_a_circle_through_several_modules_is_found(tmp_path: pathlib.Path) -> None:
    package = made_up(
        tmp_path,
        {
            "low/a": "from house.low import b",
            "low/b": "def late():\n    import house.low.c",
            "low/c": "from .a import x",
            "low/d": "from house.low import a",
        },
    )
    assert package.circles() == [["house.low.a", "house.low.b", "house.low.c"]]


def test_a_module_that_no_layer_names_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LookupError, match="house is in no layer"):
        made_up(tmp_path, {"high/roof": "import house.low"}).upward((("house.high",),))
