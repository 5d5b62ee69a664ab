"""Plans for C++ programs: the runtime runs them through a stub driver, with the twin as its GPU."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
import torch
from torch import nn

from escalade.device.tensor_map import DATA_TYPES
from escalade.device.twin import toolchain
from escalade.engine import compile
from escalade.engine.cpp_export import PLAN_FILE, SOURCES
from escalade.errors import UnsupportedError
from escalade.ops.base.cards import typical_card
from tests import fresh
from tests.commands.support import run
from tests.engine.cpp.twin_driver import ARCHITECTURE, network

HERE = pathlib.Path(__file__).with_name("cpp")


def _compiled(target: pathlib.Path, *arguments: str | pathlib.Path) -> pathlib.Path:
    headers = pathlib.Path(toolchain.nvidia_headers())
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", f"-I{headers}"]
    subprocess.run([*command, *map(str, arguments), "-ldl", "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the stub driver, the bridge to Python and the example program."""
    folder = tmp_path_factory.mktemp("cpp")
    shared = ("-shared", "-fPIC")
    _compiled(folder / "libcuda.so.1", *shared, "-Wl,-soname,libcuda.so.1", HERE / "stub_driver.cpp")
    runtime = SOURCES / "escalade_runtime.cpp"
    _compiled(folder / "bridge.so", *shared, HERE / "bridge.cpp", runtime)
    _compiled(folder / "run", SOURCES / "run.cpp", runtime)
    return folder


def test_a_c_program_matches_the_engine(tmp_path: pathlib.Path, built: pathlib.Path) -> None:
    done = fresh.python("-m", "tests.engine.cpp.twin_driver", str(built), str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr


def test_the_example_runs_and_faults_are_sentences(tmp_path: pathlib.Path, built: pathlib.Path) -> None:
    _, engine = network()
    plans = engine.export_cpp(tmp_path / "made", kernels=ARCHITECTURE)
    log, x = tmp_path / "log", torch.randn(1, 64, 16, 16)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(built), "STUB_LOG": str(log)}

    def example(*arguments: str | pathlib.Path, **changes: str) -> tuple[str, str]:
        command = [str(built / "run"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**variables, **changes})
        assert done.returncode == (1 if done.stderr else 0)
        return done.stdout, done.stderr

    x.numpy().tofile(tmp_path / "x")
    out, err = example(
        plans, "--batch", "1", "--input", tmp_path / "x", "--output", tmp_path / "y", "--repeat", "2"
    )
    plan = engine.plan_for(typical_card(ARCHITECTURE), x)
    calls = [call for step in plan.steps if step.recipe for call in step.recipe.steps]
    repeated = [call for call in calls if not call.weights_only]
    assert (
        not err
        and f"{len(repeated)} launches" in out
        and "input x: float32 [1, 64, 16, 16], 65536 bytes" in out
    )
    assert (tmp_path / "y").stat().st_size == 4 * 128 * 8 * 8
    logged = log.read_text().splitlines()
    launches = [line.split()[1] for line in logged if line.startswith("launch")]
    packing = [call.program.entry for call in calls if call.weights_only]
    assert launches == packing + 3 * [call.program.entry for call in repeated]
    assert "fault" not in log.read_text() and logged[-1] == "release with 0 allocations"

    assert "there is no plan for batch size 5; there is 1, 2" in example(plans, "--batch", "5")[1]
    assert (
        "has 65536 bytes; the input has 131072"
        in example(plans, "--batch", "2", "--input", tmp_path / "x")[1]
    )
    assert "and this GPU has compute capability 9.0 and 20 SMs" in example(plans, STUB_SMS="20")[1]
    data, broken = plans.read_bytes(), tmp_path / "broken"
    for damaged, sentence in (
        (b"", "is not a file of Escalade's plans"),
        (data[:1000], "is damaged"),
        (data[:2000] + b"?" + data[2001:], "do not match its checksum"),
        (data[:16] + b"\2" + data[17:], "has format 2, and this runtime reads 1"),
    ):
        broken.write_bytes(damaged)
        assert sentence in example(broken)[1]
    assert "cannot be read" in example(tmp_path / "absent")[1]


class InPyTorch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x.mean(1))


def test_plans_that_need_pytorch_are_refused_by_the_names_of_their_steps(tmp_path: pathlib.Path) -> None:
    engine = compile(nn.Sequential(nn.Conv2d(3, 4, 1), InPyTorch()), torch.randn(1, 3, 8, 8))
    with pytest.raises(
        UnsupportedError, match=r"the plan computes 1 \(.*linalg_inv.*\) with PyTorch, which a C\+\+"
    ):
        engine.export_cpp(tmp_path / "refused", kernels=ARCHITECTURE)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(UnsupportedError, match="kernels=True saves machine code for the GPU"):
        engine.export_cpp(tmp_path / "refused")


def test_the_runtime_knows_every_type_of_tensor_maps() -> None:
    source = (SOURCES / "escalade_runtime.cpp").read_text()
    assert all(f'{{"{name}", CU_TENSOR_MAP_DATA_TYPE_{name}}}' in source for name in DATA_TYPES.values())


def test_the_command_writes_a_folder(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "net"
    result = run("build", "tests.commands.factories:Tiny", "-o", str(folder), "--cpp", "-b", "1,3")
    assert result.exit_code == 0, result.output
    (tmp_path / "file").touch()
    for target, options, sentence in (
        (folder, (), "is a folder; pass a regular file"),
        (tmp_path / "file", ("--cpp",), "is not a folder"),
    ):
        refused = run("build", "tests.commands.factories:Tiny", "-o", str(target), *options)
        assert sentence in str(refused.exception), refused.output
    assert {each.name for each in folder.iterdir()} == {each.name for each in SOURCES.iterdir()} | {PLAN_FILE}
    assert "network.plans" in result.output and "plans for batch 1, 3 on sm_90a" in result.output
    if shutil.which("cmake"):
        headers = f"-DCUDA_INCLUDE_DIR={toolchain.nvidia_headers()}"
        subprocess.run(
            ["cmake", "-S", str(folder), "-B", str(tmp_path / "build"), headers],
            check=True,
            capture_output=True,
        )
