"""Resolve what a command works on: the device, and the part of a ladder that its options name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade import ops
from escalade.commands.options import listed
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.tune import verification


def kernel_device(name: str | None) -> torch.device:
    """Return the GPU for `cuda` (the default if there is one), the CPU for `twin`."""
    if name == "twin" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    return _gpu("--device twin runs the same kernels on the CPU")


def network_device(name: str | None) -> torch.device:
    """Return the GPU for `cuda` (the default if there is one), else the CPU."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    return _gpu("--device cpu runs PyTorch's operators instead of kernels")


def engine_device(name: str | None) -> str:
    """Return the `device` argument of `compile`: the name, or by default `cuda` if there is a GPU, else `cpu`."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        _gpu("--device cpu runs PyTorch's operators")
    return str(name)


def require_gpu(what: str) -> torch.device:
    """Return the current GPU; without one, raise UnsupportedError with a sentence that begins with `what`."""
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{what}, and PyTorch finds none; `escalade doctor` reports why")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu(instead: str) -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda needs an NVIDIA GPU that PyTorch can use, and none was found; `escalade doctor` reports "
            f"why. {instead}"
        )
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Selection:
    """Names of problems, rungs, dtypes and layouts; an empty tuple selects all."""

    problems: tuple[str, ...]
    rungs: tuple[str, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]

    @classmethod
    def of(
        cls,
        problems: list[str] | None,
        rungs: list[str] | None,
        dtypes: list[str] | None,
        layouts: list[str] | None,
    ) -> Selection:
        """Create a selection from options, which are None by default."""
        return cls(tuple(problems or ()), listed(rungs), listed(dtypes), listed(layouts))

    def parsed(self, operation: ops.Operation[Any]) -> tuple[Any, ...]:
        """Return the problems. Raises UnsupportedError if the operation does not have one of the names."""
        check_names("dtype", self.dtypes, operation.dtypes)
        check_names("layout", self.layouts, operation.layouts)
        for rung in self.rungs:
            operation.ladder.rung(rung)
        return tuple(operation.parse(name) for name in self.problems)

    def parsed_by(self, operations: Sequence[ops.Operation[Any]]) -> dict[str, tuple[Any, ...]]:
        """Return the problems per operation that has every name. Raises UnsupportedError if none does."""
        found: dict[str, tuple[Any, ...]] = {}
        refusal: UnsupportedError | None = None
        for operation in operations:
            try:
                found[operation.name] = self.parsed(operation)
            except UnsupportedError as unknown:
                refusal = unknown
        if not found and refusal is not None:
            if len(operations) == 1:
                raise refusal
            raise UnsupportedError(f"no operation has all of these names; for the last one: {refusal}")
        return found

    def jobs(
        self,
        operation: ops.Operation[Any],
        device: torch.device,
        problems: Sequence[Any] | None,
        all_configs: bool = False,
        card: Card | None = None,
    ) -> list[verification.VerificationJob]:
        """Return the jobs of problems (None for the default ones), with the default config or all of them."""
        configs = "all" if all_configs else "default"
        return verification.jobs(
            operation, device, problems=problems, rungs=self.rungs, dtypes=self.dtypes, layouts=self.layouts,
            configs=configs, card=card,
        )  # fmt: skip

    def require_work(self, planned: Sequence[verification.VerificationJob], what: str) -> None:
        """Raise UnsupportedError if the selection or one of its names leaves nothing to do, which must not pass."""
        wanted = [job for job in planned if not job.refusal]
        kinds: dict[str, tuple[tuple[str, ...], Callable[[verification.VerificationJob], str]]] = {
            "problem": (self.problems, lambda job: str(job.problem.name)),
            "rung": (self.rungs, lambda job: job.rung.name),
            "dtype": (self.dtypes, lambda job: str(job.problem.dtype)),
            "layout": (self.layouts, lambda job: str(job.problem.layout)),
        }
        for kind, (names, name_of) in kinds.items():
            if not names:
                continue
            done = {name_of(job) for job in wanted}
            for idle in dict.fromkeys(name_of(job) for job in planned):
                if idle not in done:
                    refusal = next(job.refusal for job in planned if name_of(job) == idle)
                    raise UnsupportedError(f"nothing to {what} for {kind} {idle}: {refusal}")
        if not wanted:
            refusal = planned[0].refusal if planned else "nothing matches the options"
            raise UnsupportedError(f"nothing to {what}: {refusal}")


def first_of_each_rung(planned: list[verification.VerificationJob]) -> list[verification.VerificationJob]:
    """Return every rung on each problem and layout, in the first supported dtype: the others differ only in bytes."""
    kept: dict[tuple[str, str, str], verification.VerificationJob] = {}
    for job in planned:
        key = (job.problem.name, job.problem.layout, job.rung.name)
        if key not in kept or (kept[key].refusal and not job.refusal):
            kept[key] = job
    return sorted(kept.values(), key=planned.index)


def check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UnsupportedError for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise UnsupportedError(f"{kind} {name!r}: supported are {', '.join(known)}")
