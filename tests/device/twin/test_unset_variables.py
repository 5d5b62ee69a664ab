"""Variables read before they are set: reported if a result depends on them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from escalade.device.cache import default_cache
from escalade.device.twin import build
from tests.device.twin.support import launch, planted, report_of

SOURCE = r"""
struct Pair { float first, second; };
extern "C" __global__ void unset(const float* x, float* y, int* counts, signed char* bytes, int some) {
    const int i = threadIdx.x;
    float sum = 0.f, best = -1e30f, terms[4] = {};
    int count = 0;
    Pair pair{};
    for (int j = 0; j < some; ++j) {
        sum += x[j];
        best = fmaxf(best, x[j] - 2.f);
        terms[j] = x[j];
        if (x[j] > 0.5f) ++count;
    }
    pair.first = sum;
    y[i] = sum + best + terms[0] * terms[3] + pair.first * 3.f + pair.second;
    counts[i] = count + 1;
    bytes[i] = (signed char)(count + 1);
}
"""
BUGS = {
    "a sum": ("float sum = 0.f,", "float sum,"),
    "a maximum": ("best = -1e30f,", "best,"),
    "one of an array": ("terms[4] = {}", "terms[4]"),
    "a counter": ("int count = 0;", "int count;"),
    "a member": ("Pair pair{};", "Pair pair;"),
}


def _tensors() -> tuple[torch.Tensor, ...]:
    x = torch.rand(4)
    return x, torch.zeros(32), torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int8)


def test_a_kernel_that_sets_all_it_reads_passes_and_is_built_once() -> None:
    x, y, counts, bytes_ = _tensors()
    kernel = build(SOURCE, "unset", checks=True)
    made = default_cache().misses
    launch(kernel, 1, 32, (x, y, counts, bytes_, 3))
    assert default_cache().misses == made
    assert counts.tolist() == [int((x[:3] > 0.5).sum()) + 1] * 32


@pytest.mark.parametrize("bug", BUGS)
def test_a_result_of_a_variable_that_was_never_set_is_reported(bug: str) -> None:
    values = _tensors()
    report = report_of(planted(SOURCE, BUGS[bug]), "unset", 1, 32, (*values, 3))
    assert (
        "which depends on a variable or local array that was never set" in report
        and "unset: kernel.cu:1" in report
    )
    assert not any(tensor.any() for tensor in values[1:])


ARRAYS = r"""
template <int COUNT, class T>
__device__ float body(const float* x, int set) {
    T values[COUNT];
    for (int j = 0; j < set; ++j) values[j] = T(x[j]);
    float result = 0.f;
    for (int j = 0; j < SIZE; ++j) result = COMBINE;
    return result;
}
extern "C" __global__ void in_a_template(const float* x, float* y, int set) {
    y[threadIdx.x] = body<SIZE, TYPE>(x, set);
}
extern "C" __global__ void plain(const float* x, float* y, int set) {
    TYPE values[SIZE];
    for (int j = 0; j < set; ++j) values[j] = TYPE(x[j]);
    float result = 0.f;
    for (int j = 0; j < SIZE; ++j) result = COMBINE;
    y[threadIdx.x] = result;
}
"""
COMBINATIONS = (
    ("float", 8, "fmaxf(result, float(values[j]))"),
    ("float", 3, "result + expf(-fabsf(float(values[j])) * (values[j] < 0))"),
    ("float", 64, "result + (values[j] > 0 ? 1.f : 0.f)"),
    ("short", 4, "fmaxf(result, float(values[j]))"),
    ("double", 2, "result + (values[j] > 0. ? 2.f : 1.f)"),
)
"""g++ fills local arrays with a large negative number, which cancels in the result."""


@pytest.mark.parametrize("entry", ["plain", "in_a_template"])
def test_a_local_array_that_was_not_wholly_set_is_reported_though_the_result_looks_right(entry: str) -> None:
    for kind, size, combine in COMBINATIONS:
        constants = f"#define TYPE {kind}\n#define SIZE {size}\n#define COMBINE {combine}\n"
        x, y = torch.rand(64) + 1, torch.zeros(32)
        launch(build(constants + ARRAYS, entry, checks=True), 1, 32, (x, y, size))
        report = report_of(constants + ARRAYS, entry, 1, 32, (x, y.zero_(), size - 1))
        assert f"{entry}: kernel.cu:" in report and "thread 0 of block (0, 0, 0): writes byte" in report
        assert "which depends on a variable or local array that was never set" in report
        assert not y.any()


def test_a_variable_that_no_result_depends_on_is_left_alone() -> None:
    """g++ warns of it, but also of many that are always set in time; so its warning is not enough."""
    source = planted(SOURCE, ("int count = 0;", "int other; if (some > 1) other = some; int count = 0;"))
    source = planted(
        source, ("counts[i] = count + 1;", "counts[i] = count + 1 + (some > 1 ? other : 0) - some;")
    )
    x, y, counts, bytes_ = _tensors()
    launch(build(source, "unset", checks=True), 1, 32, (x, y, counts, bytes_, 3))
    assert counts.tolist() == [int((x[:3] > 0.5).sum()) + 1] * 32


def test_results_with_the_same_bits_are_no_report() -> None:
    """-2 in every byte: the fill of unset variables, and also a valid result."""
    source = r"""extern "C" __global__ void twos(signed char* y) { y[threadIdx.x] = -2; }"""
    y = torch.zeros(32, dtype=torch.int8)
    launch(build(source, "twos", checks=True), 1, 32, (y,))
    assert y.eq(-2).all()


def test_constants_of_the_host_are_no_unset_variables() -> None:
    """Such a large result is checked by a second launch with the same constants."""
    source = r"""
__constant__ float large[32];
extern "C" __global__ void large_ones(float* y) { y[threadIdx.x] = large[threadIdx.x]; }
"""
    kernel = build(source, "large_ones", checks=True)
    values, y = torch.linspace(1e38, 3e38, 32), torch.zeros(32)
    address, size = kernel.constant("large")
    ctypes.memmove(address, values.data_ptr(), size)
    launch(kernel, 1, 32, (y,))
    assert torch.equal(y, values)
