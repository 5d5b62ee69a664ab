"""A part of an operation's ladder, as the options of `ladder`, `count`, `verify` and `precompile` name it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.tune import verification


@dataclass(frozen=True)
class Selection:
    """Problems, rungs, dtypes and layouts by name; empty stands for all."""

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
        """Return the selection of options; those that were not given are None."""
        return cls(tuple(problems or ()), tuple(rungs or ()), tuple(dtypes or ()), tuple(layouts or ()))

    def parsed(self, operation: ops.Operation[Any]) -> tuple[Any, ...]:
        """Return the problems by name; raise if the operation does not know one of the names."""
        check_names("dtype", self.dtypes, operation.dtypes)
        check_names("layout", self.layouts, operation.layouts)
        for rung in self.rungs:
            operation.ladder.rung(rung)
        return tuple(operation.parse(name) for name in self.problems)

    def parsed_by(self, operations: Sequence[ops.Operation[Any]]) -> dict[str, tuple[Any, ...]]:
        """Return the problems per operation that knows every name; raise the last refusal if none does."""
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
            raise UnsupportedError(f"no operation has all that is named; the last one says: {refusal}")
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
        """Refuse a selection that leaves nothing to do, in all or of one name: what was not run is not right."""
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
                    raise UnsupportedError(f"there is nothing to {what} for {kind} {idle}: {refusal}")
        if not wanted:
            refusal = planned[0].refusal if planned else "nothing that there is has been named"
            raise UnsupportedError(f"there is nothing to {what}: {refusal}")


def check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not among the known ones."""
    for name in given:
        if name not in known:
            raise UnsupportedError(f"there is no {what} {name!r} here; there is {', '.join(known)}")
