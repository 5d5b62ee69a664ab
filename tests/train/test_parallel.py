"""Two processes train like one, and neither continues without the other."""

from __future__ import annotations

import json
import pathlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade_apps.train import logs, pictures
from escalade_apps.train.parallel import Processes, processes
from escalade_apps.train.trainer import trainer
from tests import fresh

CPU = torch.device("cpu")
GIVEN = {
    "data": "synthetic:40", "side": 8, "width": 4, "batch": 8, "epochs": 1, "lr": 0.5, "flip": True, "optimizer": "sgd",
}  # fmt: skip
"""SGD, whose steps are proportional to gradients: Adam's are the same for a sum of gradients and for their mean."""
PROGRAM = f"""
import os, pathlib, sys, torch, torch._dynamo
from escalade.errors import EscaladeError
from escalade_apps.train import pictures
from escalade_apps.train.parallel import processes
from escalade_apps.train.trainer import trainer

other = os.fork()  # one process that has loaded all of it becomes two
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
folder = pathlib.Path(sys.argv[1])
pictures.curve = lambda *arguments: None
torch.set_num_threads(1)
try:
    with processes(torch.device("cpu")) as own:
        trainer("autoencoder", {GIVEN!r}, folder, own).run(lambda news: None)
        longer = trainer("autoencoder", {{"epochs": 9}}, folder, own, resume=True)

        def lost():
            if not own.first and longer.step == 7:
                os.kill(os.getpid(), 9)

        longer.run(lambda news: None, lost)
except EscaladeError as error:
    sys.exit(f"{{error}}; the other ended by {{os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])}}")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_processes_train_as_one_and_a_lost_one_ends_both(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "curve", lambda *arguments: None)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(1) as runner:
        began = runner.submit(fresh.python, "-c", PROGRAM, str(tmp_path / "two"), **meeting)
        trainer("autoencoder", GIVEN, tmp_path / "one", Processes(CPU)).run(lambda news: None)
        done = began.result(timeout=120)
    said = done.stderr
    assert done.returncode == 1 and "the other ended by -9" in said, said
    assert "process 0 of 2 lost contact with the others" in said and "--resume" in said
    one, two = (logs.read(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in one] == [1, 2, 3, 4, 5, 5]
    for mine, theirs in zip(one, two, strict=False):
        assert mine.keys() == theirs.keys() and theirs["loss"] == pytest.approx(mine["loss"], rel=1e-4), (
            json.dumps(two)
        )


def test_unsupported_options_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="SyncBatchNorm, which needs GPUs"):
        Processes(CPU, 0, 2).wrap(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(UnsupportedError, match="must be a multiple of the 3 processes"):
        trainer("autoencoder", GIVEN, pathlib.Path("nowhere"), Processes(CPU, 0, 3))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UnsupportedError, match="RANK is not set; .*torchrun"), processes(CPU):
        pass


def test_processes_share_a_gpu_only_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[Any, Any]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, timeout, device_id: joined.append((backend, device_id)),
    )
    given = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    gpu, first = torch.device("cuda"), torch.device("cuda", 0)
    with processes(gpu) as own:
        assert own.device == first and joined == [("nccl", first)]
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnsupportedError, match="local rank 1 has no GPU .* --share-gpu"), processes(gpu):
        pass
    with processes(gpu, share_gpus=True) as own:
        assert own.device == first and joined[1:] == [("gloo", None)]
