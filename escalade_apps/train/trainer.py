"""A run: epochs of steps over images, judged, logged and kept, so that it can go on where it was ended."""

from __future__ import annotations

import math
import pathlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from escalade.device import host_memory
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.train import checkpoints, logs, pictures
from escalade_apps.train.batches import Batch, Batches, in_order, order
from escalade_apps.train.data.images import Dataset
from escalade_apps.train.parallel import Processes
from escalade_apps.train.progress import Progress, Teller
from escalade_apps.train.settings import Settings
from escalade_apps.train.steps import PlannedStep, SharedStep, Step, arithmetic, optimizer_of
from escalade_apps.train.tasks import task_of

CHECKPOINT, BEST, LOG = "checkpoint.pt", "best.pt", "log.jsonl"
RECONSTRUCTIONS, CURVE, TENSORBOARD = "reconstructions.png", "loss.png", "tensorboard"


@dataclass(frozen=True)
class Evaluation:
    """How good the network is on images that it was not trained on."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    best: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    total: int
    best: float
    why: str


Watch = Callable[[Progress | Evaluation], None]


class Trainer:
    """A run in a folder of its own, which is all that is left of it."""

    def __init__(
        self,
        settings: Settings,
        dataset: Dataset,
        folder: pathlib.Path,
        processes: Processes,
        *,
        weights: pathlib.Path | None = None,
        state: dict[str, Any] | None = None,
        twin: bool = False,
        tensorboard: bool = False,
    ) -> None:
        """`state` is the checkpoint to go on from; `weights`, for a new run, what the network begins with. With `twin`
        the kernels run on the CPU."""
        self.settings, self.dataset, self._folder, self._processes = settings, dataset, folder, processes
        self._task, device = task_of(settings.task), processes.device
        if settings.batch % processes.count:
            raise UnsupportedError(
                f"a batch of {settings.batch} cannot be dealt to {processes.count} processes in equal parts"
            )
        if settings.batch > len(dataset.train):
            raise UnsupportedError(
                f"a batch of {settings.batch}: {dataset.name} has {len(dataset.train)} images to train on"
            )
        if settings.shift >= min(dataset.train.pixels.shape[1:3]):
            raise UnsupportedError(f"--shift {settings.shift}: that is beyond the other end of an image")
        self._checksum = dataset.train.checksum()
        self.normalization = self._task.normalization(dataset.train)
        self.model = self._make(weights if state is None else None)
        self._batches = Batches(
            dataset.train,
            settings.batch,
            device,
            seed=settings.seed,
            augmentation=settings.augmentation,
            rank=processes.rank,
            processes=processes.count,
        )
        self.total = settings.total(self._batches.steps)
        self._optimizer = optimizer_of(settings.optimizer, self.model, settings.lr, settings.weight_decay)
        self._taken = self._step(twin)
        self.step, self._best, self._since_best = 0, math.inf, 0
        if state is not None:
            self._restore(state)
        self._logs = self._open_logs(tensorboard)

    def _make(self, weights: pathlib.Path | None) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            with torch.device("meta"):
                weighed = self._task.make(self.settings, self.dataset.train)
            wanted = sum(each.nbytes for each in weighed.parameters())
            host_memory.require(wanted, f"{self.settings.task} of width {self.settings.width:,}")
            torch.manual_seed(self.settings.seed)
            model = self._task.make(self.settings, self.dataset.train)
        if weights is not None:
            self._task.load(model, weights)
        return model.to(self._processes.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def _step(self, twin: bool) -> Step:
        """A plan, between whose gradients and optimiser several processes meet, unless they do so in its midst."""
        own, loss, dtype = self._processes, self._task.loss, self.settings.dtype
        if own.meets_inside(self.model):
            if twin:
                raise UnsupportedError(
                    "--device twin: a network with BatchNorm is trained there by one process; several do it on cuda"
                )
            return SharedStep(own.wrap(self.model), loss, self._optimizer, dtype, own.device)
        own.begin_alike(self.model)
        shape = (self.settings.batch // own.count, *self.dataset.train.pixels.shape[1:])
        images = Batch(torch.zeros(shape, dtype=torch.uint8, device=own.device), None).images(
            self.normalization
        )
        labels = torch.zeros(len(images), dtype=torch.int64, device=own.device)
        example = images, self._task.target(images, labels)
        reduce = own.average if own.count > 1 else None
        return PlannedStep(self.model, loss, self._optimizer, example, dtype, twin, reduce)

    def _open_logs(self, tensorboard: bool) -> list[logs.Log]:
        if not self._processes.first:
            return []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnsupportedError(f"{printable(self._folder)} cannot be made: {error.strerror}") from error
        opened: list[logs.Log] = [logs.JsonLog(self._folder / LOG, self.step)]
        if tensorboard:
            opened.append(logs.TensorBoardLog(self._folder / TENSORBOARD, self.step))
        return opened

    def run(self, watch: Watch, stopping: Callable[[], bool] = lambda: False) -> Outcome:
        """Trains to the end, or until `stopping` says so between two steps; either way the run can go on later."""
        why = self._ended()
        own, batch = self._processes, self.settings.batch
        teller = Teller(own.device, batch, self.total, self._logs, watch)
        while why is None:
            epoch, first = divmod(self.step, self._batches.steps)
            taken = islice(self._batches.epoch(epoch, first), self.total - self.step)
            for some in taken:
                images = some.images(self.normalization)
                target = self._task.target(images, some.labels)
                rate = self.settings.rate(self.step, self.total)
                loss = own.mean(self._taken(images, target, rate))
                self.step += 1
                teller.add(self.step, loss, rate)
                self._at_step(teller, watch)
                if stopping():
                    teller.tell()
                    self._keep()
                    why = f"stopped at step {self.step:,}"
                    break
            why = why or self._ended()
        for log in self._logs:
            log.close()
        if self._processes.first:
            pictures.curve(
                logs.read(self._folder / LOG),
                f"{self.settings.task}, {self.dataset.name}",
                self._folder / CURVE,
            )
        self._processes.meet()  # whoever goes on from here finds what the first has written
        return Outcome(self.step, self.total, self._best, why)

    def _at_step(self, teller: Teller, watch: Watch) -> None:
        """What is due between two steps."""
        ends = self.step % self._batches.steps == 0 or self.step == self.total
        if ends:
            teller.tell()
            watch(self._evaluate())
        if ends or (self.settings.every and self.step % self.settings.every == 0):
            teller.tell()
            self._keep()
            teller.restart()

    def _ended(self) -> str | None:
        if self.step >= self.total:
            return f"all {self.total:,} steps taken"
        if self.settings.patience and self._since_best >= self.settings.patience:
            return f"no better evaluation for {self._since_best} epochs"
        return None

    # Judging

    def _evaluate(self) -> Evaluation:
        """The mean loss over all test images, and how many of them are classified rightly."""
        own, device, task = self._processes, self._processes.device, self._task
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # images, losses, right ones
        parts = in_order(
            self.dataset.test, self.settings.batch // own.count, device, rank=own.rank, processes=own.count
        )
        self.model.eval()
        with torch.no_grad(), arithmetic(self.settings.dtype, device):
            for number, batch in enumerate(parts):
                images = batch.images(self.normalization)
                target, output = task.target(images, batch.labels), self.model(images)
                sums[0] += len(images)
                sums[1] += task.loss(output, target).double() * len(images)
                if not task.reconstructs:
                    sums[2] += (output.argmax(1) == target).sum()
                elif number == 0 and own.first:
                    some = slice(2 * pictures.COLUMNS)
                    pictures.pairs(
                        self.normalization.undone(images[some]),
                        self.normalization.undone(output[some]),
                        self._folder / RECONSTRUCTIONS,
                    )
        self.model.train()
        count, loss, right = own.total(sums).tolist()
        return self._judged(loss / count, None if task.reconstructs else right / count)

    def _judged(self, loss: float, accuracy: float | None) -> Evaluation:
        better = loss < self._best
        self._best, self._since_best = (loss, 0) if better else (self._best, self._since_best + 1)
        if better and self._processes.first:
            checkpoints.save_weights(self._folder / BEST, self.model)
        epoch = -(-self.step // self._batches.steps)
        values = {"epoch": epoch, "loss": loss} | ({} if accuracy is None else {"accuracy": accuracy})
        for log in self._logs:
            log.write(logs.EVALUATION, self.step, **values)
        return Evaluation(self.step, epoch, loss, accuracy, better)

    # Going on later

    def _keep(self) -> None:
        if not self._processes.first:
            return
        for log in self._logs:
            log.keep()
        state = {
            "settings": self.settings.as_dict(),
            "images": self._checksum,
            "order": self._order_checksum(),
            "step": self.step,
            "best": self._best,
            "since_best": self._since_best,
            "model": self.model.state_dict(),
            "taken": self._taken.state(),
            "randomness": checkpoints.randomness(self._processes.device),
        }
        checkpoints.save(self._folder / CHECKPOINT, state)

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self._best, self._since_best = state["step"], state["best"], state["since_best"]
        if state["images"] != self._checksum:
            raise UnsupportedError(
                f"{self.dataset.name} has other images now than those that the run was begun with; a run goes on with "
                "its own"
            )
        if state["order"] != self._order_checksum():
            raise UnsupportedError(
                f"PyTorch {torch.__version__} draws another order of the images than the one that the run was begun "
                "with; resume it by that version"
            )
        self.model.load_state_dict(state["model"])
        self._taken.restore(state["taken"])
        checkpoints.restore_randomness(state["randomness"], self._processes.device)

    def _order_checksum(self) -> int:
        drawn = order(self.settings.seed, self.step // self._batches.steps, len(self.dataset.train))
        return zlib.crc32(drawn.numpy().data)
