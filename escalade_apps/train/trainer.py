"""Training loop with evaluation, logs and checkpoints that resume bit for bit."""

from __future__ import annotations

import math
import pathlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from escalade.device import host_memory
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.train import checkpoints, data, logs, pictures, tasks
from escalade_apps.train.batches import Batch, Batches, order, sequential_batches
from escalade_apps.train.data.images import Dataset
from escalade_apps.train.logs import Progress, ProgressReporter
from escalade_apps.train.parallel import Processes
from escalade_apps.train.settings import Settings, settings_of
from escalade_apps.train.steps import DistributedStep, PlannedStep, TrainerStep, arithmetic, optimizer_of
from escalade_apps.train.tasks import task_of

CHECKPOINT, BEST, LOG = "checkpoint.pt", "best.pt", "log.jsonl"
RECONSTRUCTIONS, CURVE, TENSORBOARD = "reconstructions.png", "loss.png", "tensorboard"


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy on the test images after a step."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    best: bool


@dataclass(frozen=True)
class Outcome:
    """Last step of a run, its best test loss, and why it ended."""

    step: int
    total: int
    best: float
    reason: str


Watch = Callable[[Progress | Evaluation], None]


class Trainer:
    """One run, which writes everything to its own folder."""

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
        csv: bool = False,
    ) -> None:
        """Set up a run from initial `weights`, or resume it from a checkpoint's `state`."""
        self.settings, self.dataset, self._folder, self._processes = settings, dataset, folder, processes
        self._task, device = task_of(settings.task), processes.device
        if settings.batch % processes.count:
            raise UnsupportedError(
                f"--batch {settings.batch}: must be a multiple of the {processes.count} processes"
            )
        if settings.batch > len(dataset.train):
            raise UnsupportedError(
                f"--batch {settings.batch}: {dataset.name} has only {counted(len(dataset.train), 'training image')}"
            )
        if settings.shift >= min(dataset.train.pixels.shape[1:3]):
            raise UnsupportedError(f"--shift {settings.shift}: must be less than the side of an image")
        self._checksum = dataset.train.checksum()
        self.normalization = self._task.normalization(dataset.train)
        self.model = self._make_model(weights if state is None else None)
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
        self._train_step = self._make_step(twin)
        self.step, self._best, self._since_best = 0, math.inf, 0
        if state is not None:
            self._restore(state)
        self._logs = self._open_logs(tensorboard, csv)

    def _make_model(self, weights: pathlib.Path | None) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            with torch.device("meta"):  # without memory, to find its size
                empty = self._task.make(self.settings, self.dataset.train)
            size = sum(each.nbytes for each in empty.parameters())
            host_memory.require(size, f"{self.settings.task} of width {self.settings.width:,}")
            torch.manual_seed(self.settings.seed)
            model = self._task.make(self.settings, self.dataset.train)
        if weights is not None:
            self._task.load(model, weights)
        return model.to(self._processes.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def _make_step(self, twin: bool) -> TrainerStep:
        """Return a planned step, or a DDP step if the processes communicate during the forward pass."""
        own, loss, dtype = self._processes, self._task.loss, self.settings.dtype
        if own.communicates_in_forward(self.model):
            if twin:
                raise UnsupportedError(
                    f"--device twin with {own.count} processes: a network with BatchNorm needs --device cuda, or one "
                    "process"
                )
            return DistributedStep(own.wrap(self.model), loss, self._optimizer, dtype, own.device)
        own.broadcast(self.model)
        shape = (self.settings.batch // own.count, *self.dataset.train.pixels.shape[1:])
        images = Batch(torch.zeros(shape, dtype=torch.uint8, device=own.device), None).images(
            self.normalization
        )
        labels = torch.zeros(len(images), dtype=torch.int64, device=own.device)
        example = images, self._task.target(images, labels)
        reduce = own.average if own.count > 1 else None
        return PlannedStep(self.model, loss, self._optimizer, example, dtype, twin, reduce)

    def _open_logs(self, tensorboard: bool, csv: bool) -> list[logs.Log]:
        if not self._processes.first:
            return []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnsupportedError(
                f"{printable(self._folder)} cannot be created: {error.strerror}"
            ) from error
        opened: list[logs.Log] = [logs.JsonLog(self._folder / LOG, self.step)]
        if csv:
            opened.append(logs.CsvLog(self._folder, self.step))
        if tensorboard:
            opened.append(logs.TensorBoardLog(self._folder / TENSORBOARD, self.step))
        return opened

    def run(self, watch: Watch, stopping: Callable[[], bool] = lambda: False) -> Outcome:
        """Train to the end, or until `stopping` returns True after a step. The run can be resumed either way."""
        reason = self._end_reason()
        own, batch_size = self._processes, self.settings.batch
        reporter = ProgressReporter(own.device, batch_size, self.total, self._logs, watch)
        while reason is None:
            epoch, first = divmod(self.step, self._batches.steps)
            batches = islice(self._batches.epoch(epoch, first), self.total - self.step)
            for batch in batches:
                images = batch.images(self.normalization)
                target = self._task.target(images, batch.labels)
                rate = self.settings.rate(self.step, self.total)
                loss = own.mean(self._train_step(images, target, rate))
                self.step += 1
                reporter.add(self.step, loss, rate)
                self._after_step(reporter, watch)
                if stopping():
                    reporter.flush()
                    self._save()
                    reason = f"stopped at step {self.step:,}"
                    break
            reason = reason or self._end_reason()
        for log in self._logs:
            log.close()
        if self._processes.first:
            pictures.curve(
                logs.read(self._folder / LOG),
                f"{self.settings.task}, {self.dataset.name}",
                self._folder / CURVE,
            )
        self._processes.barrier()  # the files of the first process are written when any process returns
        return Outcome(self.step, self.total, self._best, reason)

    def _after_step(self, reporter: ProgressReporter, watch: Watch) -> None:
        """Evaluate and save a checkpoint if due."""
        ends_epoch = self.step % self._batches.steps == 0 or self.step == self.total
        if ends_epoch:
            reporter.flush()
            watch(self._evaluate())
        if ends_epoch or (self.settings.every and self.step % self.settings.every == 0):
            reporter.flush()
            self._save()
            reporter.restart_clock()

    def _end_reason(self) -> str | None:
        if self.step >= self.total:
            return f"all {counted(self.total, 'step')} done"
        if self.settings.patience and self._since_best >= self.settings.patience:
            return f"no better evaluation for {self._since_best} epochs"
        return None

    # Evaluation

    def _evaluate(self) -> Evaluation:
        """Compute the mean loss over all test images, and for a classifier the accuracy."""
        own, device, task = self._processes, self._processes.device, self._task
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # images, loss, correct predictions
        batches = sequential_batches(
            self.dataset.test, self.settings.batch // own.count, device, rank=own.rank, processes=own.count
        )
        self.model.eval()
        with torch.no_grad(), arithmetic(self.settings.dtype, device):
            for number, batch in enumerate(batches):
                images = batch.images(self.normalization)
                target, output = task.target(images, batch.labels), self.model(images)
                sums[0] += len(images)
                sums[1] += task.loss(output, target).double() * len(images)
                if not task.reconstructs:
                    sums[2] += (output.argmax(1) == target).sum()
                elif number == 0 and own.first:
                    some = slice(2 * pictures.COLUMNS)
                    pictures.pairs(
                        self.normalization.invert(images[some]),
                        self.normalization.invert(output[some]),
                        self._folder / RECONSTRUCTIONS,
                    )
        self.model.train()
        count, loss, correct = own.total(sums).tolist()
        return self._record_evaluation(loss / count, None if task.reconstructs else correct / count)

    def _record_evaluation(self, loss: float, accuracy: float | None) -> Evaluation:
        better = loss < self._best
        self._best, self._since_best = (loss, 0) if better else (self._best, self._since_best + 1)
        if better and self._processes.first:
            checkpoints.save_weights(self._folder / BEST, self.model)
        epoch = -(-self.step // self._batches.steps)
        values = {"epoch": epoch, "loss": loss} | ({} if accuracy is None else {"accuracy": accuracy})
        for log in self._logs:
            log.write(logs.EVALUATION, self.step, **values)
        return Evaluation(self.step, epoch, loss, accuracy, better)

    # Checkpoints

    def _save(self) -> None:
        if not self._processes.first:
            return
        for log in self._logs:
            log.flush()
        state = {
            "settings": self.settings.as_dict(),
            "images": self._checksum,
            "order": self._order_checksum(),
            "step": self.step,
            "best": self._best,
            "since_best": self._since_best,
            "model": self.model.state_dict(),
            "taken": self._train_step.state(),
            "randomness": checkpoints.randomness(self._processes.device),
        }
        checkpoints.save(self._folder / CHECKPOINT, state)

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self._best, self._since_best = state["step"], state["best"], state["since_best"]
        if state["images"] != self._checksum:
            raise UnsupportedError(
                f"the images of {self.dataset.name} have changed since the run was started; resume it with the "
                "original images"
            )
        if state["order"] != self._order_checksum():
            raise UnsupportedError(
                f"PyTorch {torch.__version__} shuffles the images differently from the version the run was started "
                "with; resume it with that version"
            )
        self.model.load_state_dict(state["model"])
        self._train_step.restore(state["taken"])
        checkpoints.restore_randomness(state["randomness"], self._processes.device)

    def _order_checksum(self) -> int:
        shuffled = order(self.settings.seed, self.step // self._batches.steps, len(self.dataset.train))
        return zlib.crc32(shuffled.numpy().data)


def trainer(
    task: str,
    given: Mapping[str, Any],
    folder: pathlib.Path,
    processes: Processes,
    *,
    resume: bool = False,
    weights: pathlib.Path | None = None,
    twin: bool = False,
    tensorboard: bool = False,
    csv: bool = False,
) -> Trainer:
    """Return a new run, or with `resume` the one in `folder` at its last checkpoint.

    Settings that are not given default to the task's, or to those the run was started with. A run that was stopped
    before its first checkpoint starts over.
    """
    if resume and not folder.is_dir():
        raise UnsupportedError(
            f"--resume: there is no folder {printable(folder)}; pass the --output of the run, or leave --resume out to "
            "start one"
        )
    state = checkpoints.load(folder / CHECKPOINT)
    if state is not None and not resume:
        raise UnsupportedError(
            f"{printable(folder)} already holds a run; continue it with --resume, or pass another --output"
        )
    if state is None:
        settings = tasks.settings(task, given, processes.device)
    else:
        try:
            settings = settings_of(state["settings"])
        except ValueError as error:
            raise UnsupportedError(
                f"{printable(folder / CHECKPOINT)}: invalid settings: it {error}"
            ) from error
        settings = settings.resumed({"task": task, **given})
    dataset = data.read(settings.data, side=settings.side, held_out=settings.held_out, seed=settings.seed)
    return Trainer(
        settings, dataset, folder, processes,
        weights=weights, state=state, twin=twin, tensorboard=tensorboard, csv=csv,
    )  # fmt: skip
