"""mma, ldmatrix and stmatrix against plain matrix products."""

from __future__ import annotations

import math

import pytest
import torch

from escalade.device.twin import build
from tests import formulas
from tests.device.twin.support import ORDERS, launch

PRODUCT = r"""
#include "common/ptx.cuh"
extern "C" __global__ void product(const u32* a, const u32* b, float* d) {  // fragments, lane by lane
    const int lane = threadIdx.x;
    u32 ra[4], rb[2];
    float rd[4];
    for (int i = 0; i < 4; ++i) ra[i] = a[lane * 4 + i], rd[i] = d[lane * 4 + i];
    for (int i = 0; i < 2; ++i) rb[i] = b[lane * 2 + i];
    mma_INSTRUCTION(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[lane * 4 + i] = rd[i];
}
"""
LANES = torch.arange(32)
GROUP, MEMBER = LANES // 4, LANES % 4


def _words(elements: torch.Tensor) -> torch.Tensor:
    return elements.contiguous().view(torch.int32)


def _fragments(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fragments of all lanes, by the tables of the PTX manual."""
    half = a.shape[1] // 2
    rows = torch.stack((GROUP, GROUP + 8, GROUP, GROUP + 8), 1)
    later = torch.tensor([0, 0, half, half])
    each = torch.arange(4 // a.element_size())  # elements per register
    k = (len(each) * MEMBER[:, None] + later)[..., None] + each
    k_of_b = (len(each) * MEMBER[:, None] + torch.tensor([0, half]))[..., None] + each
    return _words(a[rows[..., None], k])[..., 0], _words(b[k_of_b, GROUP[:, None, None]])[..., 0]


def _accumulators(d: torch.Tensor) -> torch.Tensor:
    i = torch.arange(4)
    return d[GROUP[:, None] + 8 * (i // 2), 2 * MEMBER[:, None] + i % 2].contiguous()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("instruction", "dtype", "depth"),
    [
        ("m16n8k16_f16", torch.half, 16),
        ("m16n8k16_bf16", torch.bfloat16, 16),
        ("m16n8k8_tf32", torch.float, 8),
        ("m16n8k32_e4m3", torch.float8_e4m3fn, 32),
    ],
)
def test_products(instruction: str, dtype: torch.dtype, depth: int, special: bool) -> None:
    kernel = build(PRODUCT.replace("INSTRUCTION", instruction), "product")
    a, b = torch.randn(16, depth).to(dtype), torch.randn(depth, 8).to(dtype)
    if special:  # e4m3 has no infinity: they become a number or NaN
        a[0, 0], a[3, 1], b[2, 5] = math.nan, math.inf, -math.inf
    start = torch.randn(16, 8)
    exact_a, exact_b = (_truncated(m) if dtype == torch.float else m for m in (a, b))
    expected = _accumulators((formulas.product(exact_a, exact_b.T) + start).float())
    for order in ORDERS[:2]:
        d = _accumulators(start)
        launch(kernel, 1, 32, (*_fragments(a, b), d), order=order)
        torch.testing.assert_close(d, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def _truncated(m: torch.Tensor) -> torch.Tensor:
    """The hardware ignores the low 13 bits of a tf32 operand."""
    return (m.view(torch.int32) & ~0x1FFF).view(torch.float)


MATRICES = r"""
#include "common/ptx.cuh"
extern "C" __global__ void matrices(const u16* x, u32* loaded, u32* transposed, u16* stored, u16* turned) {
    __shared__ __align__(16) u16 rows[32][8], back[32][8], back_turned[32][8];
    const int lane = threadIdx.x;
    for (int i = 0; i < 8; ++i) rows[lane][i] = x[lane * 8 + i];
    __syncwarp();
    u32 r[4], t[4];
    load_matrices(r, shared_address(rows[lane]));
    load_matrices_transposed(t, shared_address(rows[lane]));
    store_matrices(shared_address(back[lane]), r);
    store_matrices_transposed(shared_address(back_turned[lane]), r);
    __syncwarp();
    for (int i = 0; i < 4; ++i) loaded[lane * 4 + i] = r[i], transposed[lane * 4 + i] = t[i];
    for (int i = 0; i < 8; ++i) stored[lane * 8 + i] = back[lane][i], turned[lane * 8 + i] = back_turned[lane][i];
}
"""


def test_matrices_between_registers_and_shared_memory() -> None:
    x = torch.randint(-(2**15), 2**15, (4, 8, 8), dtype=torch.int16)
    kernel = build(MATRICES, "matrices", checks=True)

    def registers(m: torch.Tensor) -> torch.Tensor:
        return _words(m.reshape(4, 32, 2)).reshape(4, 32).T.contiguous()

    for order in ORDERS[:2]:
        loaded, transposed = torch.zeros(2, 32, 4, dtype=torch.int32)
        stored, turned = torch.zeros(2, 4, 8, 8, dtype=torch.int16)
        launch(kernel, 1, 32, (x, loaded, transposed, stored, turned), order=order)
        assert torch.equal(loaded, registers(x))
        assert torch.equal(transposed, registers(x.mT.contiguous()))
        assert torch.equal(stored, x)
        assert torch.equal(turned, x.mT)


ROUNDING = r"""
#include "common/ptx.cuh"
extern "C" __global__ void rounding(const float* x, u32* y) { y[threadIdx.x] = to_tf32(x[threadIdx.x]); }
"""


def test_tf32_rounds_to_nearest() -> None:
    x = torch.cat((torch.randn(60), torch.tensor([math.inf, -math.inf, 0.0, 1 + 2**-11])))
    y = torch.zeros(64, dtype=torch.int32)
    launch(build(ROUNDING, "rounding"), 1, 64, (x, y))
    rounded = y.view(torch.float)
    assert torch.equal(rounded[-4:], torch.tensor([math.inf, -math.inf, 0.0, 1 + 2**-10]))
    assert ((rounded - x)[:60].abs() <= x[:60].abs() * 2**-11).all()
    assert not (y & 0x1FFF).any()
