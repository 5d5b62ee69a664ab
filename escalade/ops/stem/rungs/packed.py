"""Packed weights of the stem's tensor-core rungs, which keep them in registers."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Workspace
from escalade.ops.base.grid import blocks
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.rungs.tiles import MOST_WIDTH, filter_steps

PACK_THREADS = 256


def unsupported(name: str, problem: StemProblem) -> str | None:
    p = problem
    if p.dtype not in ("fp16", "bf16"):
        return f"{name} takes fp16 and bf16, not {p.dtype}; `separate` takes every dtype"
    if p.filters % 16 or p.filters > 128:
        return f"{name} takes multiples of 16 filters up to 128, not {p.filters}; `separate` takes any number"
    if p.filter_width > MOST_WIDTH:
        return f"{name} takes filters up to {MOST_WIDTH} wide, not {p.filter_width}; `separate` takes any"
    if filter_steps(p) > 32:
        return f"{name} keeps the weights in registers; {p.filter_height} filter rows do not fit"
    return None


def pack(problem: StemProblem, warp_blocks: int, pixel_a_lane: bool) -> tuple[KernelCall, Workspace]:
    """Return the launch that packs weights in the order of the fragments' registers, and its workspace."""
    p = problem
    elements = filter_steps(p) * 16 * p.filters
    call = KernelCall(
        Program.of("stem/pack.cu", problem=p, warp_blocks=warp_blocks, pixel_a_lane=pixel_a_lane),
        (blocks(elements, PACK_THREADS), 1, 1),
        (PACK_THREADS, 1, 1),
        (Buffer("weight"), Buffer("packed"), elements, p.filters // 16),
        overlap=True,
        weights_only=True,
    )
    return call, Workspace("packed", elements * 2)
