"""Check many random networks on the twin, on a GPU, or on the CPU with PyTorch computing the nodes of each plan."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from tests.random_models.runs import DTYPES, KINDS, Run, failures, of_the_day


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_models", description=__doc__)
    parser.add_argument("kind", choices=KINDS, help="inference, training steps, or views of PyTorch's steps")
    parser.add_argument("--seeds", help="FIRST:BEYOND, or some with commas; without it the first of today")
    parser.add_argument("--count", type=int, default=20, help="how many of today")
    parser.add_argument(
        "--device",
        default="twin",
        help="twin, cuda, cpu, or h200: plan for an H200 without one, and compute the plan on the CPU",
    )
    parser.add_argument(
        "--dtype", default="", help="fp32, tf32, fp16, bf16 or several, for each; else they take turns"
    )
    parser.add_argument(
        "--wide", action="store_true", help="more channels and sizes: more kernels to compile"
    )
    parser.add_argument("--links", type=int, default=1, help="of views: chains in one network")
    parser.add_argument(
        "--no-graph", action="store_true", help="on a GPU: launch step by step, without a CUDA graph"
    )
    parser.add_argument("--show", action="store_true", help="print the code of each network and run none")
    parser.add_argument("--trace", action="store_true", help="print where it failed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    more = {"device": options.device, "wide": options.wide, "links": options.links,
            "no_graph": options.no_graph}  # fmt: skip
    dtypes = options.dtype.split(",") if options.dtype else DTYPES
    if options.seeds is None:
        runs = list(of_the_day(options.kind, options.count, dtypes, **more))
    else:
        seeds = [seed for part in options.seeds.split(",") for seed in _range(part)]
        each = {seed: dtypes if options.dtype else dtypes[seed % len(dtypes) :][:1] for seed in seeds}
        runs = [Run(options.kind, seed, dtype, **more) for seed in seeds for dtype in each[seed]]
    if options.show:
        print(*(run.text for run in runs), sep="\n\n")
        return 0
    found = failures(runs, say=True, trace=options.trace)
    print(f"{len(runs)} runs, {len(found)} failed")
    return 1 if found else 0


def _range(part: str) -> range:
    first, _, beyond = part.partition(":")
    return range(int(first), int(beyond or int(first) + 1))


if __name__ == "__main__":
    os.environ.setdefault("ESCALADE_CACHE_DIR", os.path.join(os.getcwd(), ".cache", "escalade"))
    sys.exit(main())
