"""Startup times, each in a fresh process: `python -m tests.gpu.starting [resnet18 resnet50]`.

For each network: `compile` and new batch sizes without cached kernels, the same with all of them cached, then
`save` with machine code, and `load` to the first result with an empty cache. `--results results` stores a record of
time. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

import escalade
from escalade import models
from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import STARTUP

_BATCHES = (8, 32)


class _Laps:
    """Wall-clock seconds between calls, the GPU's work included; imports and CUDA's start are not."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        assert callable(escalade.compile) and callable(escalade.load), "they are imported when first named"
        self.begin()

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._last = time.perf_counter()

    def end(self, what: str) -> None:
        torch.cuda.synchronize()
        self.seconds[what] = time.perf_counter() - self._last
        self.begin()


def made(network: str, file: str) -> dict[str, float]:
    """From the model to a result, other batches, and a file."""
    model, x = models.model(network)
    model, x = model.cuda(), x.cuda()
    more = [models.example(network, batch).cuda() for batch in _BATCHES]
    laps = _Laps()
    engine = escalade.compile(model, x, dtype="fp16")
    engine(x)
    laps.end("compile, first result")
    for images in more:
        engine(images)
        laps.end(f"new batch of {len(images)}")
    engine.save(file, kernels=True)
    laps.end("save")
    return laps.seconds


def loaded(network: str, file: str) -> dict[str, float]:
    """From the file to a result."""
    x = models.example(network, 1).cuda()
    laps = _Laps()
    engine = escalade.load(file, device="cuda")
    engine(x)
    laps.end("load, first result")
    return laps.seconds


def fresh(part: str, network: str, file: pathlib.Path, cache: pathlib.Path) -> dict[str, float]:
    """Output of a part, in a process with its own cache."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.starting", f"--{part}", network, str(file)],
        env={**os.environ, "ESCALADE_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(arguments: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        print("there is no GPU here, and starting on one is what this measures")
        return 1
    parts = {"--made": made, "--loaded": loaded}
    if arguments and arguments[0] in parts:
        print(json.dumps(parts[arguments[0]](*arguments[1:])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=("resnet18", "resnet50"))
    parser.add_argument("--results", type=pathlib.Path, help="a folder like results/ to file records in")
    asked = parser.parse_args(arguments)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for network in asked.networks:
            file, cache = pathlib.Path(folder, f"{network}.escalade"), pathlib.Path(folder, network)
            for what, part, kernels in (
                ("nothing cached", "made", cache),
                ("kernels cached", "made", cache),
                ("kernels in the file", "loaded", cache / "empty"),
            ):
                seconds = fresh(part, network, file, kernels)
                records += [
                    store.Record(
                        STARTUP, network, "fp16", "nhwc", 1, "escalade", f"{name}, {what}", wall_us=each * 1e6
                    )
                    for name, each in seconds.items()
                ]
                print(
                    f"{network}, {what}:", ", ".join(f"{name} {each:.3f} s" for name, each in seconds.items())
                )
    if asked.results:
        origin = store.provenance(torch.device("cuda", 0), "python -m tests.gpu.starting")
        store.file_away(asked.results, [record.stamped(origin) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
