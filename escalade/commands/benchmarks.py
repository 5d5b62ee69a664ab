"""Check the options of `escalade bench`."""

from __future__ import annotations

from escalade.commands.selection import check_names
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.networks.judging import MOST
from escalade_bench.networks.workload import Workload


def check_options(dtypes: tuple[str, ...], size: int | None, chosen: Workload) -> None:
    check_names("dtype", dtypes, tuple(MOST))
    if missing := [dtype for dtype in dtypes if dtype in QUANTIZED and dtype not in chosen.further_dtypes]:
        raise UnsupportedError(
            f"{chosen.name} is measured in {', '.join(chosen.dtypes)}; {' and '.join(missing)} is for ResNets"
        )
    if size is None or size == chosen.size:
        return
    if chosen.smallest is None:
        raise UnsupportedError(f"inputs of {size}: {chosen.name} takes {chosen.size} only")
    if size < chosen.smallest:
        raise UnsupportedError(f"images of {size}: these networks take {chosen.smallest} or more")


def wanted_parts(
    named: set[str], with_usual: bool, phases: bool, chosen: Workload, on_gpu: bool
) -> tuple[str, ...]:
    """Return the named parts, and the usual ones that can be measured here; without phases if not wanted."""
    for name in named:
        if name not in chosen.parts:
            raise UnsupportedError(f"{chosen.name} has no part {name!r}; it has {', '.join(chosen.parts)}")
        if chosen.parts[name].needs_gpu and not on_gpu:
            raise UnsupportedError(f"{name} is measured on a GPU, and there is none")
    usual = {name for name, part in chosen.parts.items() if part.usual and (on_gpu or not part.needs_gpu)}
    wanted = (named | usual if with_usual else named) - (set() if phases else {"phases"})
    if not wanted:
        raise UnsupportedError(
            f"no part is left to measure here; {chosen.name} has {', '.join(chosen.parts)}"
            + ("" if on_gpu else ", some of them on a GPU only")
        )
    return tuple(name for name in chosen.parts if name in wanted)
