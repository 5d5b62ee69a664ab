"""Several processes that train one model, each on its part of every batch, as torchrun starts them."""

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

_PATIENCE = timedelta(minutes=5)
"""How long a process waits for the others before it takes them for gone."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LostError(EscaladeError, RuntimeError):
    """Another process of the job has ended."""


@dataclass(frozen=True)
class Processes:
    """Who this process is among those that train together."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """The one that speaks and writes for all."""
        return self.rank == 0

    def meets_inside(self, model: nn.Module) -> bool:
        """Whether the processes meet in the midst of a pass through the model."""
        batch_norm = nn.modules.batchnorm._BatchNorm
        return self.count > 1 and any(isinstance(each, batch_norm) for each in model.modules())

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients that are the mean of all processes'; BatchNorm sees all their images."""
        if self.count == 1:
            return model
        if self.meets_inside(model):
            if self.device.type != "cuda":
                raise UnsupportedError(
                    "BatchNorm over the images of several processes is PyTorch's SyncBatchNorm, which needs GPUs; "
                    "train this network on the CPU by one process"
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)

    def begin_alike(self, model: nn.Module) -> None:
        """Gives all processes the parameters and buffers of the first."""
        if self.count > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def average(self, gradients: torch.Tensor) -> None:
        """Makes of what each process has the mean of them all, in place."""
        dist.all_reduce(gradients)
        gradients /= self.count

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of what each process has."""
        return self.total(value) / self.count

    def total(self, value: torch.Tensor) -> torch.Tensor:
        if self.count == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def meet(self) -> None:
        """Waits until all are here."""
        self.total(torch.zeros(1, device=self.device))


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Joins the processes that torchrun has started; without it this process is the only one.

    A process that is lost ends the others: what they raise then is a sentence.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(device)
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UnsupportedError(f"WORLD_SIZE is {count} but {missing[0]} is not set; torchrun sets them all")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UnsupportedError(
                f"process {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
                "start as many with --nproc-per-node, or use --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Processes(device, rank, count)
    except (dist.DistBackendError, dist.DistNetworkError, RuntimeError) as error:
        if isinstance(error, EscaladeError) or not _is_about_others(error):
            raise
        raise LostError(
            f"process {rank} of {count} cannot reach the others any more, so the job ends here: one of them has ended "
            f"or the network has failed ({str(error).splitlines()[0]}). --resume goes on from the last checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()


_ABOUT_OTHERS = ("gloo", "connection", "nccl", "peer", "timed out", "broken pipe", "socket")


def _is_about_others(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or any(
        word in text for word in _ABOUT_OTHERS
    )
