"""The model for Triton Inference Server under examples/: by the server's Python interface, and on a server."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import escalade

ROOT = pathlib.Path(__file__).parent.parent
SIDE, CLASSES = 32, 6


@pytest.fixture(scope="module")
def engine() -> escalade.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    ).eval()
    example = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return escalade.compile(model, example, dtype="fp32", device="cpu", normalize=half)


@pytest.fixture
def repository(engine: escalade.Engine, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(ROOT / "examples" / "triton_server", tmp_path / "models")
    engine.save(tmp_path / "models" / "escalade" / "1" / "model.escalade")
    return tmp_path / "models"


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 3, SIDE, SIDE), np.uint8)


class Tensor:
    """The parts of `triton_python_backend_utils.Tensor` that the model uses."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        self.name, self.value = name, value

    @classmethod
    def from_dlpack(cls, name: str, value: Any) -> Tensor:
        return cls(name, torch.from_dlpack(value))

    def to_dlpack(self) -> Any:
        return torch.to_dlpack(self.value)


class StandIn(types.ModuleType):
    """The parts of `triton_python_backend_utils` that the model uses; it exists inside a server only. Requests are
    dictionaries."""

    TritonError = RuntimeError

    class InferenceResponse(types.SimpleNamespace):
        def __init__(self, output_tensors: list[Tensor], error: Exception | None = None) -> None:
            super().__init__(output_tensors=output_tensors, error=error)

    class ModelConfig:
        def __init__(self, text: str) -> None:
            self.said, self.inputs, self.outputs = json.loads(text), [], []  # type: ignore[var-annotated]

        def as_dict(self) -> dict[str, Any]:
            return self.said

        def add_input(self, given: dict[str, Any]) -> None:
            self.inputs.append(given)

        def add_output(self, given: dict[str, Any]) -> None:
            self.outputs.append(given)

    @staticmethod
    def get_input_tensor_by_name(request: dict[str, Tensor], name: str) -> Tensor:
        return request[name]


def test_requests_are_one_call_and_each_gets_its_part(
    engine: escalade.Engine,
    repository: pathlib.Path,
    images: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = StandIn("triton_python_backend_utils")
    monkeypatch.setattr(backend, "Tensor", Tensor, raising=False)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    spec = importlib.util.spec_from_file_location("served", repository / "escalade" / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = json.dumps({"max_batch_size": 6})
    config = module.TritonPythonModel.auto_complete_config(backend.ModelConfig(text))
    assert config.inputs == [{"name": "IMAGES", "data_type": "TYPE_UINT8", "dims": [3, SIDE, SIDE]}]
    assert config.outputs == [{"name": "LOGITS", "data_type": "TYPE_FP32", "dims": [CLASSES]}]

    model = module.TritonPythonModel()
    model.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0", "model_config": text})
    x = torch.from_numpy(images)

    def ask(*parts: torch.Tensor) -> list[Any]:
        return list(model.execute([{"IMAGES": Tensor("IMAGES", part)} for part in parts]))

    answers = [each.output_tensors[0].value for each in ask(x[:1], x[1:3], x[3:])]
    assert [len(each) for each in answers] == [1, 2, 2]
    torch.testing.assert_close(torch.cat(answers), engine(x))
    first, refused, last = ask(x[:1], x[:1, :, :8], x[1:3])
    assert "serves [batch, 3, 32, 32]" in str(refused.error) and not refused.output_tensors
    for answered, expected in ((first, x[:1]), (last, x[1:3])):
        assert answered.error is None
        torch.testing.assert_close(answered.output_tensors[0].value, engine(expected))
    model.finalize()


@contextmanager
def serving(program: str, repository: pathlib.Path) -> Iterator[str]:
    """Return a server's address. Its Python may be another one, so it gets the path of our packages."""
    version = repository / "escalade" / "1"
    (version / "model.py").rename(version / "served.py")
    places = [str(ROOT), *(place for place in sys.path if place.endswith("site-packages"))]
    (version / "model.py").write_text(
        f"import sys\nsys.path += {places}\nfrom served import TritonPythonModel\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program, "--model-repository", str(repository), "--http-address", "127.0.0.1", "--http-port", str(port),
        "--allow-grpc", "false", "--allow-metrics", "false",
    ]  # fmt: skip
    beside = pathlib.Path(program).resolve().parent.parent / "backends"
    if beside.is_dir():
        command += ["--backend-directory", str(beside)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said


def test_a_server_answers_its_own_client(
    engine: escalade.Engine, repository: pathlib.Path, images: np.ndarray
) -> None:
    program = shutil.which("tritonserver")
    if program is None or importlib.util.find_spec("tritonclient") is None:
        pytest.skip("there is no tritonserver, or no tritonclient")
    http = importlib.import_module("tritonclient.http")
    with serving(program, repository) as address, closing(http.InferenceServerClient(address)) as client:
        wait_for(client)
        given = http.InferInput("IMAGES", images.shape, "UINT8").set_data_from_numpy(images)
        answer = client.infer("escalade", [given]).as_numpy("LOGITS")
    torch.testing.assert_close(torch.from_numpy(answer.copy()), engine(torch.from_numpy(images)))


def wait_for(client: Any) -> None:
    for _ in range(300):
        try:
            if client.is_model_ready("escalade"):
                return
        except OSError:
            pass
        time.sleep(0.4)
    raise TimeoutError("the server is not ready")
