"""Engines under the load of a service for any length of time: `python -m tests.gpu.soak --seconds 3600`.

Threads call small networks of every dtype with batches of many sizes, more than an engine keeps plans for: plain
calls, calls with `out=`, futures of which some are cancelled, and streams abandoned half way. Two more
threads train networks, with new training steps again and again. Now and then memory runs out for a while. Every
result and every loss is compared. Memory, open files and threads are counted every second; at the end they must be
unchanged. Without a GPU it runs on the twin.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import random
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from escalade import training_step
from escalade.engine import Engine, compile
from escalade.errors import OutOfMemory
from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import SOAK

SIZES = (1, 2, 3, 5, 8)
PLANS = 3
TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}
_NO_MEMORY_EVERY, _NO_MEMORY_FOR = 5.0, 0.1
"""Seconds between phases without memory, and the length of each."""
_GROWTH = 1.02
"""Tolerance for growth, of medians over many seconds."""
_FEWEST = 15
"""Minimum length of a quarter of the time, in seconds; nothing is flat in less than a minute."""


class Images(nn.Module):
    """Convolutions, a PyTorch step, and enough launches that a plan is a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.deeper = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        y = torch.relu(y + self.deeper(y)).mean((2, 3))
        return self.head(torch.cumsum(y, 1) / 16)


class Rows(nn.Module):
    """A few launches, called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)


@dataclass
class Served:
    """An engine, and inputs with the right results for each."""

    engine: Engine
    inputs: dict[int, torch.Tensor]
    expected: dict[int, torch.Tensor]

    @staticmethod
    def of(model: nn.Module, item: tuple[int, ...], dtype: str, device: str) -> Served:
        torch.manual_seed(1)
        home = "cpu" if device == "twin" else device
        engine = compile(model, torch.randn(2, *item), dtype=dtype, device=device, plans=PLANS, buffers=2)
        inputs = {size: torch.randn(size, *item) for size in SIZES}
        with torch.no_grad():
            expected = {size: model.double()(x.double()).float() for size, x in inputs.items()}
        model.float()
        return Served(engine, {size: x.to(home) for size, x in inputs.items()}, expected)

    def is_right(self, size: int, result: torch.Tensor) -> bool:
        expected = self.expected[size]
        off = (result.cpu().float() - expected).abs().max() / expected.abs().max()
        return bool(off < TOLERANCE[self.engine.dtype])


@dataclass
class Trained:
    """A network to train from the same state again and again, and PyTorch's losses in float64."""

    model: nn.Module
    dtype: str
    device: str
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[float]

    @staticmethod
    def of(dtype: str, device: str) -> Trained:
        torch.manual_seed(2)
        home = "cpu" if device == "twin" else device
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        )  # fmt: skip
        sizes = (4, 4, 2, 4, 2, 2)
        batches = [(torch.randn(size, 3, 16, 16), torch.randint(0, 10, (size,))) for size in sizes]
        exact, losses = copy.deepcopy(model).double(), []
        optimizer = _optimizer(exact)
        for x, target in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(exact(x.double()), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return Trained(
            model.to(home), dtype, device, [(x.to(home), target.to(home)) for x, target in batches], losses
        )

    def off(self) -> float:
        """Train a copy on all batches; return the largest relative difference of a loss."""
        model = copy.deepcopy(self.model)
        step = training_step(
            model, nn.functional.cross_entropy, _optimizer(model), self.batches[0], dtype=self.dtype,
            device=self.device, loss_scale=1024.0 if self.dtype == "fp16" else None,
        )  # fmt: skip
        found = [float(step(x, target)) for x, target in self.batches]
        return max(abs(one - exact) / exact for one, exact in zip(found, self.losses, strict=True))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


@dataclass
class Sample:
    """The process's resources at one second."""

    second: float
    calls: int
    host_bytes: int
    device_bytes: int
    files: int
    threads: int


@dataclass
class Soak:
    served: list[Served]
    trained: list[Trained]
    device: str
    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scarce: threading.Event = field(default_factory=threading.Event)
    shortages: int = 0
    """Number of times that memory was withheld so far: a phase may begin and end during one call."""
    over: threading.Event = field(default_factory=threading.Event)

    def work(self, seed: int) -> None:
        """One thread of the service, on its own stream."""
        chance = random.Random(seed)
        ways: dict[str, Callable[[Served, int, random.Random], None]] = {
            "called": self._called, "into": self._into, "submitted": self._submitted, "streamed": self._streamed,
        }  # fmt: skip
        on_gpu = self.device.startswith("cuda")
        stream = torch.cuda.Stream() if on_gpu else None
        with torch.cuda.stream(stream):
            while not self.over.is_set():
                name, one = chance.choice(list(ways.items())), chance.choice(self.served)
                before = self.shortages
                was_scarce = self.scarce.is_set()
                try:
                    name[1](one, chance.choice(SIZES), chance)
                    self.calls[name[0]] += 1
                except (OutOfMemory, torch.OutOfMemoryError):
                    self.calls["without memory"] += 1
                    if not was_scarce and self.shortages == before:
                        self.wrong.append(f"{name[0]}: there was memory, and it was said that there was none")
                except Exception as error:
                    self.wrong.append(f"{name[0]} {one.engine.dtype}: {type(error).__name__}: {error}")

    def train(self, one: Trained) -> None:
        """One training thread, on its own stream."""
        stream = torch.cuda.Stream() if self.device.startswith("cuda") else None
        with torch.cuda.stream(stream):
            while not self.over.is_set():
                before, was_scarce = self.shortages, self.scarce.is_set()
                try:
                    off = one.off()
                    self.calls["trained"] += 1
                    if not off < TOLERANCE[one.dtype]:
                        self.wrong.append(f"training in {one.dtype}: a loss is off by {off:.1e}")
                except (OutOfMemory, torch.OutOfMemoryError):
                    self.calls["without memory"] += 1
                    if not was_scarce and self.shortages == before:
                        self.wrong.append("training: out of memory although memory was available")
                except Exception as error:
                    self.wrong.append(f"training in {one.dtype}: {type(error).__name__}: {error}")

    def _check(self, one: Served, size: int, result: torch.Tensor) -> None:
        if not one.is_right(size, result):
            self.wrong.append(f"{one.engine!r} is wrong for a batch of {size}")

    def _called(self, one: Served, size: int, chance: random.Random) -> None:
        x = one.inputs[size]
        self._check(
            one, size, one.engine(x.half() if chance.random() < 0.2 and one.engine.dtype == "fp16" else x)
        )

    def _into(self, one: Served, size: int, chance: random.Random) -> None:
        room = torch.empty_like(one.expected[size], device=one.inputs[size].device)
        one.engine(one.inputs[size], out=room)
        self._check(one, size, room)

    def _submitted(self, one: Served, size: int, chance: random.Random) -> None:
        pending = [one.engine.submit(one.inputs[size]) for _ in range(3)]
        if chance.random() < 0.5:
            pending[-1].cancel()
        for each in pending:
            try:
                self._check(one, size, each.result())
            except CancelledError:
                self.calls["cancelled"] += 1

    def _streamed(self, one: Served, size: int, chance: random.Random) -> None:
        """Request a random number of eight batches."""
        batch = one.inputs[size].cpu()
        wanted = chance.randrange(1, 9)
        results = one.engine.stream(batch for _ in range(8))
        for _, result in zip(range(wanted), results, strict=False):
            self._check(one, size, result)
        results.close()

    def run(self, seconds: float, workers: int) -> None:
        threads = [threading.Thread(target=self.work, args=(seed,)) for seed in range(workers)]
        threads += [threading.Thread(target=self.train, args=(one,)) for one in self.trained]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        try:
            while (passed := time.monotonic() - began) < seconds:
                self.samples.append(self._sample(passed))
                if passed % _NO_MEMORY_EVERY < 1:
                    self.shortages += 1
                    with no_memory(self.device, self.scarce):
                        time.sleep(_NO_MEMORY_FOR)
                time.sleep(max(0.0, began + len(self.samples) - time.monotonic()))
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def _sample(self, second: float) -> Sample:
        on_gpu = self.device.startswith("cuda")
        return Sample(
            round(second, 1),
            self.calls.total(),
            int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
            torch.cuda.memory_allocated() if on_gpu else 0,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )

    def leaks(self) -> list[str]:
        """Return growth from the second quarter of the time to the last."""
        quarter = len(self.samples) // 4
        if quarter < _FEWEST:
            return []
        before, after = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        found = []
        for name in ("host_bytes", "device_bytes", "files", "threads"):
            counts = [[getattr(one, name) for one in part] for part in (before, after)]
            first, last = map(statistics.median, counts)
            if last > _GROWTH * first + 2 + max(map(_by_chance, counts)):
                found.append(f"{name} grew from {first:.0f} to {last:.0f}")
        return found


def _by_chance(counts: Sequence[int]) -> float:
    """Tolerance of a median: which plans an engine has at that time is random."""
    return 3 * 1.25 * statistics.pstdev(counts) / len(counts) ** 0.5


@contextmanager
def no_memory(device: str, scarce: threading.Event) -> Iterator[None]:
    """Fail all allocations beyond the memory PyTorch already holds; on the CPU nothing fails."""
    scarce.set()
    try:
        if device.startswith("cuda"):
            torch.cuda.set_per_process_memory_fraction(0.0)
        yield
    finally:
        if device.startswith("cuda"):
            torch.cuda.set_per_process_memory_fraction(1.0)
        time.sleep(0.05)  # for refused calls
        scarce.clear()


def record(
    soak: Soak, seconds: float, workers: int, problems: Sequence[str], origin: store.Provenance
) -> store.Record:
    """Return the counts as shown by docs/records.md. The date is part of the name, so that runs do not replace each
    other."""
    late = soak.samples[len(soak.samples) // 4 :]

    def span(name: str, unit: float = 1.0) -> list[float]:
        counts = [getattr(one, name) / unit for one in late]
        return [round(min(counts), 1), round(max(counts), 1)] if counts else []

    apart = {"cancelled": "cancelled", "refused": "without memory", "trainings": "trained"}
    counted = {name: soak.calls[key] for name, key in apart.items()}
    config = {
        "seconds": round(seconds), "calls": soak.calls.total() - sum(counted.values()), **counted,
        "host": span("host_bytes", 2**20), "device": span("device_bytes", 2**20), "files": span("files"),
        "threads": span("threads"),
    }  # fmt: skip
    what = f"{workers} threads and {len(soak.trained)} that train, {origin.date}"
    found = store.Record(SOAK, what, "", "", 0, "escalade", "", config=config, failure="; ".join(problems))
    return found.stamped(origin)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path, help="a file for what was counted every second")
    parser.add_argument("--results", type=pathlib.Path, help="a folder like results/ to file a record in")
    asked = parser.parse_args(arguments)
    device = "cuda:0" if torch.cuda.is_available() else "twin"
    dtypes = ("fp32", "tf32", "fp16", "bf16") if device != "twin" else ("fp32", "fp16")
    torch.manual_seed(0)
    models: tuple[tuple[nn.Module, Any], ...] = ((Images().eval(), (3, 32, 32)), (Rows().eval(), (32,)))
    served = [Served.of(model, item, dtype, device) for model, item in models for dtype in dtypes]
    soak = Soak(served, [Trained.of(dtype, device) for dtype in ("fp32", "fp16")], device)
    soak.run(asked.seconds, asked.workers)
    if asked.json:
        asked.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in soak.samples))
    print(f"{device}, {asked.workers} threads, {asked.seconds:.0f} s: {dict(soak.calls)}")
    for one in soak.samples[:: max(1, len(soak.samples) // 6)]:
        print(
            f"{one.second:8.1f} s {one.calls:9d} calls  host {one.host_bytes / 2**20:8.1f} MiB  device "
            f"{one.device_bytes / 2**20:8.2f} MiB  {one.files} files  {one.threads} threads"
        )
    problems = [
        *(f"{text} ({times} times)" for text, times in Counter(soak.wrong).most_common(8)),
        *soak.leaks(),
    ]
    if asked.results:
        origin = store.provenance(torch.device(device.replace("twin", "cpu")), "python -m tests.gpu.soak")
        store.file_away(asked.results, [record(soak, asked.seconds, asked.workers, problems, origin)])
    is_long = len(soak.samples) >= 4 * _FEWEST
    print("\n".join(problems) or f"results right{', memory flat, nothing leaked' if is_long else ''}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
