"""One run of a random network: its seed, dtype and device; and the command that repeats it."""

from __future__ import annotations

import datetime
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from escalade.engine.plan.kernel_program import KernelProgram
from tests.random_models import views
from tests.random_models.draft import SMALL, WIDE
from tests.random_models.generator import draw
from tests.random_models.judge import check, check_training
from tests.random_models.program import Text

KINDS = ("network", "training", "views")
DTYPES = ("fp16", "fp32", "bf16", "tf32")
LINKS = 6
"""Chains in one network of views on the twin, where building a network takes longer than running it."""
_A_DAY = 1000
"""Seeds of one day."""


@dataclass(frozen=True)
class Run:
    kind: str
    seed: int
    dtype: str
    device: str = "twin"
    wide: bool = False
    links: int = 1
    no_graph: bool = False

    @property
    def text(self) -> Text:
        if self.kind == "views":
            return views.drawn(self.seed, self.links) if self.links > 1 else views.numbered(self.seed)
        return draw(self.seed, WIDE if self.wide else SMALL, self.kind == "training")

    @property
    def command(self) -> str:
        more = (" --wide" if self.wide else "") + (f" --links {self.links}" if self.links > 1 else "")
        more += " --no-graph" if self.no_graph else ""
        return (
            f"python -m tests.random_models {self.kind} --seeds {self.seed} --dtype {self.dtype} "
            f"--device {self.device}{more}"
        )

    def check(self) -> None:
        if self.kind == "training":
            check_training(self.text, self.dtype, self.device)
        elif self.kind == "views":
            # The larger batch needs a larger arena; the first one is repeated after memory has been freed.
            check(self.text, self.dtype, self.device, (2, 5, 2), thorough=False)
        else:
            check(self.text, self.dtype, self.device, (2, 3, 1) if self.wide else (2, 3))

    def failure(self, trace: bool = False) -> str:
        """Return the failure with the network's code and the command, or an empty string."""
        try:
            with without_graphs() if self.no_graph else nullcontext():
                self.check()
        except Exception as error:
            where = traceback.format_exc() if trace else ""
            said = f"{type(error).__name__}: {error}"
            return f"{said}\n{self.text}\n{where}repeat with: {self.command}"
        return ""


@contextmanager
def without_graphs() -> Iterator[None]:
    """Engines launch their steps one by one: PyTorch cannot record a CUDA graph without its caching allocator."""
    recording = KernelProgram._capture
    KernelProgram._capture = lambda self, stream: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        KernelProgram._capture = recording  # type: ignore[method-assign]


def today() -> int:
    """The number of the day, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().toordinal()


def of_the_day(
    kind: str, count: int, dtypes: Sequence[str] = DTYPES, first: int = 0, **more: object
) -> Iterator[Run]:
    """Other runs every day, with alternating dtypes."""
    for number in range(first, first + count):
        seed = today() * _A_DAY + number
        yield Run(kind, seed, dtypes[number % len(dtypes)], **more)  # type: ignore[arg-type]


def failures(runs: Iterable[Run], say: bool = False, trace: bool = False) -> list[str]:
    found = []
    for run in runs:
        began = time.process_time()
        failure = run.failure(trace)
        if failure:
            found.append(failure)
        if say:
            which = f"{run.kind} {run.seed} {run.dtype}"
            seconds = f"{time.process_time() - began:.1f} s of CPU"
            print(f"wrong {which}: {failure}" if failure else f"right {which}, {seconds}", flush=True)
    return found
