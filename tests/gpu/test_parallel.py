"""Two processes that share the GPU train like one process: planned steps, and DDP with SyncBatchNorm."""

from __future__ import annotations

import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from escalade_apps.train import logs, pictures
from escalade_apps.train.parallel import Processes
from escalade_apps.train.trainer import trainer
from tests import fresh
from tests.train.test_parallel import free_port

pytestmark = pytest.mark.gpu

GIVEN: dict[str, Any] = {
    "data": "synthetic:64", "side": 32, "width": 8, "batch": 16, "epochs": 1, "lr": 0.05, "optimizer": "sgd",
    "dtype": "fp32",
}  # fmt: skip
PROGRAM = """
import json, os, pathlib, sys, torch, torch._dynamo
from escalade_apps.train import pictures
from escalade_apps.train.parallel import processes
from escalade_apps.train.trainer import trainer

other = os.fork()  # before CUDA starts
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
task, folder, given = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
pictures.curve = lambda *arguments: None
with processes(torch.device("cuda"), share_gpus=True) as own:
    assert own.device == torch.device("cuda", 0) and own.count == 2
    run = trainer(task, given, folder, own)
    run.run(lambda news: None)
    weights = torch.cat([each.detach().flatten() for each in run.model.parameters()])
    assert torch.allclose(own.mean(weights), weights, atol=1e-6), "the processes have different weights"
    print(type(run._train_step).__name__, flush=True)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.parametrize(("task", "step"), [("autoencoder", "PlannedStep"), ("resnet18", "DistributedStep")])
def test_two_processes_on_one_gpu_train_as_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cuda: torch.device, task: str, step: str
) -> None:
    monkeypatch.setattr(pictures, "curve", lambda *arguments: None)
    given = dict(GIVEN)
    if task == "resnet18":
        # Its last stage normalizes 16 values per channel, which amplifies rounding errors: small steps keep them small.
        given["lr"] = 0.002
        del given["width"]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(1) as runner:
        began = runner.submit(
            fresh.python, "-c", PROGRAM, task, str(tmp_path / "two"), json.dumps(given), **meeting
        )
        trainer(task, given, tmp_path / "one", Processes(torch.device("cuda", 0))).run(lambda news: None)
        done = began.result(timeout=300)
    assert done.returncode == 0 and done.stdout.split() == [step, step], done.stdout + done.stderr
    one, two = (logs.read(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) and [line["step"] for line in one] == [line["step"] for line in two]
    for mine, theirs in zip(one, two, strict=True):
        # Later steps amplify the rounding of the first: another summation order, and other kernels.
        losses = [[line["loss"] for line in log] for log in (one, two)]
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=2e-3), losses
