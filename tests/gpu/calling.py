"""Compare the cost of calls and kernels: `python -m tests.gpu.calling` times calls of networks beside their replays.

`replay` is the plan's CUDA graph over its own memory. `copied` is a replay between copies of the input and of the
results: the cost of a call if kernels could not get new addresses. `call` is a call over one input, whose results
PyTorch's allocator places where earlier ones were, `moving` one over another input each time. All of these are device
time, from event to event; `host` is the time that a call blocks the host while the GPU waits for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle

import torch

import escalade
from escalade import models
from escalade.engine.engine import Engine

ROUNDS = 10
FEWEST_US = 50_000
"""A round takes at least this long on the device, so that clocks are those under load."""
LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def works(engine: Engine, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    program, others = engine.program(x), cycle([x.clone() for _ in range(3)])
    types = [result.dtype for result in _results(engine(x))]

    def copied() -> list[torch.Tensor]:
        program.inputs[0].copy_(x)
        program.run()
        return [output.to(dtype, copy=True) for output, dtype in zip(program.outputs, types, strict=True)]

    program.inputs[0].copy_(x)
    return {
        "replay": program.run,
        "copied": copied,
        "call": lambda: engine(x),
        "moving": lambda: engine(next(others)),
    }


def _results(returned: object) -> tuple[torch.Tensor, ...]:
    return (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)  # type: ignore[arg-type]


def on_device(work: Callable[[], object]) -> float:
    """Return microseconds per call, for many in a row."""

    def row(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host gets ahead
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return 1000 * begin.elapsed_time(end) / count

    return row(max(10, int(FEWEST_US / row(10))))


def on_host(work: Callable[[], object]) -> float:
    """Return microseconds until a single call returns."""
    spent = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return 1e6 * statistics.median(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="resnet18,resnet50")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--layouts", default="nhwc,nchw")
    parser.add_argument("--types", default="", help="of the input, the dtype's own unless given")
    options = parser.parse_args()
    worst = 0.0
    for name in options.networks.split(","):
        torch.manual_seed(0)
        model = getattr(models, name)().eval()
        for batch in map(int, options.batches.split(",")):
            for layout in options.layouts.split(","):
                for kind in (options.types or options.dtype).split(","):
                    x = torch.randn(batch, 3, 224, 224, device="cuda").to(TYPES[kind])
                    x = x.contiguous(memory_format=LAYOUTS[layout])
                    engine = escalade.compile(model, x, dtype=options.dtype, device="cuda")
                    timed = works(engine, x)
                    rounds: dict[str, list[float]] = {name: [] for name in timed}
                    for _ in range(ROUNDS):
                        for what, work in timed.items():
                            rounds[what].append(on_device(work))
                    took = {what: statistics.median(each) for what, each in rounds.items()}
                    host = {what: on_host(timed[what]) for what in ("call", "moving")}
                    ratio = took["call"] / took["replay"]
                    worst = max(worst, ratio)
                    print(
                        f"{name} b{batch} {options.dtype} of {kind} {layout}: "
                        + ", ".join(f"{what} {each:.1f}" for what, each in took.items())
                        + f" µs; call {ratio:.4f} times the replay; host "
                        + ", ".join(f"{what} {each:.1f}" for what, each in host.items())
                        + " µs",
                        flush=True,
                    )
    print(f"a call is at most {worst:.4f} times its replay")
    return 0


if __name__ == "__main__":
    sys.exit(main())
