"""A kernel of your own: CUDA C++ from a file, run over PyTorch tensors, on a GPU or on the CPU twin.

    python examples/own_kernel.py

`row_sum.cu` is next to this file. A `Program` is a source with its compile-time choices, a `Recipe` the launches, and
`bind` returns a callable. The tensors' device decides where it runs: CUDA tensors on the GPU, CPU tensors on the twin,
which can also check every memory access.
"""

from __future__ import annotations

import pathlib

import torch

from escalade.device import Buffer, KernelCall, Program, Recipe, TwinOptions, bind
from escalade.errors import LaunchError

SOURCE = pathlib.Path(__file__).with_name("row_sum.cu")


def row_sum(rows: int, columns: int, *, threads: int = 128, waits: bool = True) -> Recipe:
    """Return the launch as data: nothing is compiled or run yet."""
    program = Program.of(str(SOURCE.resolve()), "row_sum", {"THREADS": threads, "WAITS": waits})
    arguments = (Buffer("x"), Buffer("y"), columns)
    return Recipe((KernelCall(program, grid=(rows, 1, 1), block=(threads, 1, 1), arguments=arguments),))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(6, 1000, device=device)
    y = torch.empty(6, device=device)
    bind(row_sum(*x.shape), {"x": x, "y": y})()
    torch.testing.assert_close(y, x.sum(1), atol=1e-4, rtol=1e-4)
    print(f"row_sum on {'the GPU' if device == 'cuda' else 'the CPU twin'}: right")

    # The twin's checks find bugs that a GPU may hide: here a missing barrier.
    x, y = x.cpu(), y.cpu()
    broken = bind(row_sum(*x.shape, waits=False), {"x": x, "y": y}, options=TwinOptions(checks=True))
    try:
        broken()
    except LaunchError as report:
        print(f"\nWithout __syncthreads the twin says:\n{report}")
    else:
        raise AssertionError("the race went unseen")


if __name__ == "__main__":
    main()
