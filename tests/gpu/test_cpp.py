"""Plans in a C++ program on the GPU: the example, compiled with g++, against the engine."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
import torch

from escalade import models
from escalade.device.twin import toolchain
from escalade.engine import compile
from escalade.engine.cpp_export import SOURCES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("cpp") / "run"
    sources = [str(SOURCES / name) for name in ("run.cpp", "escalade_runtime.cpp")]
    headers = f"-I{toolchain.nvidia_headers()}"
    subprocess.run(["g++", "-std=c++17", "-O2", headers, *sources, "-ldl", "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_the_example_matches_the_engine(
    tmp_path: pathlib.Path, example: pathlib.Path, name: str, dtype: str
) -> None:
    model, x = models.model(name)
    if name == "unet":
        x = x[..., :64, :64].contiguous()
    model, x = model.cuda(), x.cuda()
    engine = compile(model, x, dtype=dtype, batches=[1, 5])
    plans = engine.export_cpp(tmp_path)
    for batch in (1, 5):
        images = torch.randn(batch, *x.shape[1:], device="cuda")
        form = engine.plan(images).forms[engine.graph.inputs[0].name]
        expected = engine(images)
        images.to(form.dtype).cpu().numpy().tofile(tmp_path / "x")
        command = [str(example), str(plans), "--batch", str(batch), "--repeat", "20"]
        command += ["--input", str(tmp_path / "x"), "--output", str(tmp_path / "y")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(name, dtype, batch, done.stdout.splitlines()[-1])
        plan = engine.plan(images)
        data = torch.frombuffer(bytearray((tmp_path / "y").read_bytes()), dtype=torch.uint8)
        result = plan.forms[plan.graph.outputs[0]].view(data, 0).cuda().float()
        torch.testing.assert_close(
            result, expected.float(), rtol=1e-3, atol=1e-3 * float(expected.abs().max())
        )
