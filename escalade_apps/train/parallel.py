"""Data-parallel training in processes started by torchrun, each with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from escalade.errors import EscaladeError, UnsupportedError

_TIMEOUT = timedelta(minutes=5)
"""Collectives that take longer fail: another process is gone."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LostError(EscaladeError, RuntimeError):
    """Another process of the job has exited."""


@dataclass(frozen=True)
class Processes:
    """Rank and device of this process, and the number of processes."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """True for the process that prints and writes files."""
        return self.rank == 0

    def communicates_in_forward(self, model: nn.Module) -> bool:
        """Return True if BatchNorm statistics are exchanged during the forward pass."""
        batch_norm = nn.modules.batchnorm._BatchNorm
        return self.count > 1 and any(isinstance(each, batch_norm) for each in model.modules())

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP, with SyncBatchNorm for BatchNorm."""
        if self.count == 1:
            return model
        if self.communicates_in_forward(model):
            if self.device.type != "cuda":
                raise UnsupportedError(
                    f"BatchNorm in {self.count} processes uses PyTorch's SyncBatchNorm, which needs GPUs; train this "
                    "network on the CPU in one process"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def broadcast(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of the first process to all others."""
        if self.count > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def average(self, gradients: torch.Tensor) -> None:
        """All-reduce to the mean, in place."""
        dist.all_reduce(gradients)
        gradients /= self.count

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.total(value) / self.count

    def total(self, value: torch.Tensor) -> torch.Tensor:
        if self.count == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait for all processes."""
        self.total(torch.zeros(1, device=self.device))


@contextmanager
def processes(device: torch.device, *, share_gpus: bool = False) -> Iterator[Processes]:
    """Join the process group of torchrun. Without torchrun this process is the only one.

    With `share_gpus`, several processes may use one GPU. NCCL does not support that, so gloo connects them, through
    host memory. Raises LostError if another process exits or cannot be reached.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device)
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UnsupportedError(
            f"WORLD_SIZE is {count} but {missing[0]} is not set; start the job with torchrun"
        )
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    uses_nccl = device.type == "cuda" and not share_gpus
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if local >= gpus and not share_gpus:
            raise UnsupportedError(
                f"local rank {local} has no GPU of its own: this machine has {gpus}; lower --nproc-per-node to that "
                "number, or use --device cpu, or --share-gpu for a test"
            )
        device = torch.device("cuda", local % gpus)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if uses_nccl else "gloo", timeout=_TIMEOUT, device_id=device if uses_nccl else None
    )
    try:
        yield Processes(device, rank, count)
    except (dist.DistBackendError, dist.DistNetworkError, RuntimeError) as error:
        if isinstance(error, EscaladeError) or not _is_communication_error(error):
            raise
        raise LostError(
            f"process {rank} of {count} lost contact with the others: one of them has exited or the network has failed "
            f"({str(error).splitlines()[0]}). Resume from the last checkpoint with --resume"
        ) from error
    finally:
        dist.destroy_process_group()


_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "peer", "timed out", "broken pipe", "socket")


def _is_communication_error(error: BaseException) -> bool:
    # gloo raises plain RuntimeErrors, which only their text tells apart.
    text = str(error).lower()
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or any(
        word in text for word in _COMMUNICATION_WORDS
    )
