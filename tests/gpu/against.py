"""Compare the speed of two checkouts: `python -m tests.gpu.against OTHER` times networks of both on one GPU.

Each checkout has its own process, which first builds its engines. Then they are timed in turns, so that a card that
warms up does so for both. Timed is the device time of one replay of a network's CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parents[2]
REPLAYS = 100
"""Replays timed per turn."""
FEWEST_US = 50_000
"""A turn takes at least this long on the device, so that clocks are those under load."""


class Checkout:
    """The process that times one checkout's engines."""

    def __init__(self, folder: pathlib.Path) -> None:
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a checkout's process ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> Any:
        self.send(request)
        return self.answer()


def serve() -> None:
    """Answer requests, one JSON line each: `make` returns the largest value of a result, `time` microseconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by libraries is not an answer
    import torch

    import escalade
    from escalade import models

    programs: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "make":
            torch.manual_seed(0)
            model = getattr(models, request["network"])().eval()
            x = torch.randn(request["batch"], 3, 224, 224).to("cuda", torch.float16)
            x = x.to(memory_format=torch.channels_last)
            engine = escalade.compile(model, x, dtype=request["dtype"], device="cuda")
            program = engine.program(x)
            program.inputs[0].copy_(x)
            program.run()
            programs[request["case"]] = (engine, program, x)
            found: Any = float(program.outputs[0].float().abs().max())
        else:
            found = _turn(*programs[request["case"]][1:])
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _turn(program: Any, x: Any) -> list[float]:
    import torch

    def once() -> None:
        # New inputs each time: if a plan overwrites its input, a card would next get numbers that take less power.
        program.inputs[0].copy_(x)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        program.run()
        end.record()
        pairs.append((begin, end))

    pairs: list[tuple[Any, Any]] = []
    for _ in range(10):
        once()
    torch.cuda.synchronize()
    each = 1000 * pairs[-1][0].elapsed_time(pairs[-1][1])
    pairs.clear()
    for _ in range(max(REPLAYS, int(FEWEST_US / each))):
        once()
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for begin, end in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=pathlib.Path)
    parser.add_argument("--networks", default="resnet18,resnet50")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    both = {"here": Checkout(HERE), "other": Checkout(options.other)}
    cases = [(n, int(b)) for n in options.networks.split(",") for b in options.batches.split(",")]
    worst = 0.0
    for network, batch in cases:
        request = {"case": f"{network} b{batch}", "network": network, "batch": batch, "dtype": options.dtype}
        for checkout in both.values():
            checkout.send({"do": "make", **request})
        largest = {name: checkout.answer() for name, checkout in both.items()}
        times: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(options.turns):
            for name in list(both) if turn % 2 else list(both)[::-1]:
                times[name] += both[name].ask({"do": "time", "case": request["case"]})
        here, other = (statistics.median(times[name]) for name in ("here", "other"))
        worst = max(worst, here / other)
        print(
            f"{request['case']:14} {options.dtype} here {here:9.2f} µs, other {other:9.2f} µs, "
            f"{here / other:.4f} times; largest results {largest['here']:.4g}, {largest['other']:.4g}",
            flush=True,
        )
    print(f"at most {worst:.4f} times the other's")
    return 0


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        sys.exit(main())
