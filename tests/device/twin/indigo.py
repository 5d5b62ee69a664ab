"""Findings of the twin's checks in Indigo's kernels: graph codes with bugs planted by its authors.

    python -m tests.device.twin.indigo FOLDER --results results

FOLDER is the output of `generate_CUDA_codes.py` of https://github.com/burtscher/IndigoSuite; a kernel's name lists its
bugs. Every kernel runs on small random graphs. Findings are stored as records, for docs/twin.md.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator, Sequence

import torch

from escalade.device.twin import TwinKernel, build
from escalade.errors import TwinError
from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import INDIGO
from tests.device.twin.support import launch

BUGS = ("atomicBug", "boundsBug", "guardBug", "raceBug", "syncBug")
TOGETHER = 8
"""Kernels compiled as one, each with its own shared memory."""
BEGIN, END = '#include "indigo_cuda.h"', "void serial_code("
"""Device code is between these markers."""
GRAPHS = ((10, 30, 12), (40, 130, 44))
"""Vertices, edges and CTAs: one CTA per vertex, or a few more."""
THREADS = 64


def source(files: Sequence[pathlib.Path]) -> str:
    """The kernels of several files as one, with an argument that selects the kernel."""
    kernels, calls = [], []
    for number, file in enumerate(files):
        text = file.read_text().partition(BEGIN)[2].partition(END)[0]
        kernels.append(f"namespace kernel_{number} {{\n{text}\n}}")
        calls.append(
            f"case {number}: return kernel_{number}::test_kernel(nindex, nlist, data1, data2, numv);"
        )
    return "\n".join(
        [
            "typedef int data_t;",
            *kernels,
            'extern "C" __global__ void one_of(int which, int* nindex, int* nlist, int* data1, int* data2, int numv) {',
            *["switch (which) {", *calls, "}", "}"],
        ]
    )


def graph(vertices: int, edges: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Start offsets of each vertex's neighbors, and the neighbors."""
    pairs = torch.randint(vertices, (edges, 2))
    match kind:
        case "undirected":
            pairs = torch.cat([pairs, pairs.flip(1)])
        case "ascending":  # the last vertex has no neighbors
            pairs = pairs.sort(1).values
        case "descending":  # and neither has the first
            pairs = pairs.sort(1, descending=True).values
    pairs = torch.unique(pairs[pairs[:, 0] != pairs[:, 1]], dim=0)
    degrees = torch.bincount(pairs[:, 0], minlength=vertices)
    begins = torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)])
    return begins.int(), pairs[:, 1].int().contiguous()


def reports(kernel: TwinKernel, which: int) -> Iterator[str]:
    for vertices, edges, blocks in GRAPHS:
        for kind in ("directed", "undirected", "ascending", "descending"):
            nindex, nlist = graph(vertices, edges, kind)
            size = max(vertices, len(nlist))
            data1, data2 = torch.randint(vertices, (size,)).int(), torch.randint(size, (size,)).int()
            data1[0] = data2[0] = 0
            try:
                launch(kernel, blocks, THREADS, (which, nindex, nlist, data1, data2, vertices), limit_s=5)
            except TwinError as error:
                yield str(error).splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--results", type=pathlib.Path, help="a folder like results/ to file records in")
    asked = parser.parse_args()
    torch.manual_seed(0)
    files = sorted(asked.folder.rglob("*.cu"))
    found: dict[str, list[bool]] = {}
    for first in range(0, len(files), TOGETHER):
        group = files[first : first + TOGETHER]
        kernel = build(source(group), "one_of", checks=True)
        for which, file in enumerate(group):
            bugs = tuple(bug for bug in BUGS if bug in file.stem)
            said = next(reports(kernel, which), "")
            kind = bugs[0] if len(bugs) == 1 else f"{len(bugs)} of these" if bugs else "nothing"
            found.setdefault(kind, []).append(bool(said))
            if bool(said) != bool(bugs):
                print(f"{file.stem}: {said or 'nothing is reported'}", flush=True)
    records = [
        store.Record(
            INDIGO, kind, "", "", 0, "escalade", "", config={"kernels": len(flags), "reported": sum(flags)}
        )
        for kind, flags in found.items()
    ]
    for record in records:
        print(f"{record.problem}: {record.config['reported']} of {record.config['kernels']} reported")
    if asked.results:
        origin = store.provenance(torch.device("cpu"), "python -m tests.device.twin.indigo FOLDER")
        store.file_away(asked.results, [record.stamped(origin) for record in records])


if __name__ == "__main__":
    main()
