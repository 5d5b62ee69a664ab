"""Global memory: overruns into neighboring buffers, unwritten memory, single bytes, overlapping buffers."""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace

import pytest
import torch

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order, TwinError, Unwritten, build
from escalade.errors import LaunchError
from escalade.ops import OPERATIONS
from escalade.ops.batch_statistics import BatchStatisticsProblem, SplitConfig
from tests.device.twin.support import ORDERS, arguments, launch, planted, report_of
from tests.support import in_threads

COPY = r"""
extern "C" __global__ void copy(const float* x, float* y, int from, int to) {
    const int i = threadIdx.x;
    const float value = x[i + from];
    y[i + to] = value;
}
"""


def _neighbors() -> tuple[torch.Tensor, torch.Tensor]:
    """Two adjacent buffers: the second begins where the first ends."""
    room = torch.arange(128.0)
    return room[:64], room[64:]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (
            (1, 0),
            "kernel.cu:4: thread 63 of block (0, 0, 0): reads 4 bytes outside the launch's buffers: 0 bytes past ",
        ),
        (
            (64, 0),
            "thread 0 of block (0, 0, 0): reads 4 bytes outside the launch's buffers: 0 bytes past the end of",
        ),
        (
            (0, -64),
            "thread 0 of block (0, 0, 0): writes 4 bytes outside the launch's buffers: 256 bytes before buffer 1",
        ),
        ((0, 1000000), "writes 4 bytes outside the launch's buffers: 3999744 bytes past the end of buffer 1"),
    ],
)
def test_an_overrun_into_the_next_buffer_is_reported(start: tuple[int, int], expected: str) -> None:
    x, y = _neighbors()
    before = torch.cat((x, y))
    assert expected in report_of(COPY, "copy", 1, 64, (x, y, *start))
    assert torch.equal(torch.cat((x, y)), before)
    launch(build(COPY, "copy", checks=True), 1, 64, (x, y, 0, 0))
    assert torch.equal(y, x)


def test_unhooked_stores_are_found_next_to_a_buffer_and_far_from_it() -> None:
    """The twin places nothing behind a copy: far overruns fault, near ones are detected by marks."""
    source = r"""
extern "C" __global__ void unseen(float* y, int at) {
    auto* address = reinterpret_cast<volatile float*>(y + at);
    asm volatile("" : "+r"(address));
    [&]() __attribute__((no_sanitize("thread"), noinline)) { *address = 1.f; }();
}"""
    room = torch.zeros(4096)
    y = room[1001:1019]
    kernel = build(source, "unseen", checks=True)
    launch(kernel, 1, 1, (y, 17))
    assert y[17] == 1
    with pytest.raises(
        TwinError, match="wrote outside the launch's buffers: (0 bytes past the end of|4 bytes before) b"
    ):
        launch(kernel, 1, 1, (y, 18))
    with pytest.raises(
        TwinError, match="kernel.cu:5: thread 0 .* accesses unmapped memory at .* past the end of buffer 0"
    ):
        launch(kernel, 1, 1, (y, 2000))
    assert room.sum() == 1


def test_buffers_that_overlap_stay_so() -> None:
    room = torch.arange(128.0)
    source = COPY.replace(
        "y[i + to] = value;",
        "__syncthreads(); y[i + to] = value; __syncthreads(); y[i + to] += x[i + to + 32];",
    )
    x, y, part = room[:96], room[32:], room[40:50]
    expected = room.clone()
    expected[32:96] = 2 * room[:64]
    launch(build(source, "copy", checks=True), 1, 64, (x, y, 0, 0, part))
    assert torch.equal(room, expected)


def test_a_table_of_pointers_into_buffers_is_followed() -> None:
    """The launch normally runs on copies, which a pointer stored in memory bypasses: then it runs on the originals."""
    source = r"""
extern "C" __global__ void gather(float* const* table, float* y) {
    y[threadIdx.x] += 1.f;
    table[1][threadIdx.x] = table[0][threadIdx.x] + 1.f;
}"""
    x, y, z = torch.randn(32), torch.zeros(32), torch.zeros(32)
    table = torch.tensor([x.data_ptr(), z.data_ptr()])
    kernel = build(source, "gather", checks=True)
    ranges = [(t.data_ptr(), t.nbytes) for t in (table, y, x, z)]
    kernel.launch((1, 1, 1), (32, 1, 1), arguments((table, y)), buffers=ranges)
    assert torch.equal(z, x + 1) and torch.equal(y, torch.ones(32))
    assert kernel.unwritten(z.data_ptr(), 128, 4) == [] and kernel.unwritten(x.data_ptr(), 128, 4) == list(
        range(32)
    )


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_buffer_that_cannot_be_written_can_be_read() -> None:
    pages = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    x = torch.frombuffer(memoryview(pages), dtype=torch.float32)
    y = torch.ones(64)
    launch(build(COPY, "copy", checks=True), 1, 64, (x, y, 0, 0))
    assert not y.any()


@pytest.mark.parametrize("buffer", [(0, 64), (0x123456789000, 4), (-1, 1 << 50)])
def test_a_buffer_that_is_no_memory_is_named(buffer: tuple[int, int]) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    start, size = buffer if buffer[0] >= 0 else (x.data_ptr(), buffer[1])
    kernel = build(COPY, "copy", checks=True)
    with pytest.raises(
        LaunchError, match=rf"copy: buffer 1, {size} bytes at {start:#x}, is not all memory of this"
    ):
        kernel.launch(
            (1, 1, 1), (64, 1, 1), arguments((x, y, 0, 0)), buffers=[(y.data_ptr(), 256), (start, size)]
        )


# ---------------------------------------------------------------- unwritten memory

STEPS = r"""
extern "C" __global__ void fill(const float* x, float* room, int count) {
    if (int(threadIdx.x) < count) room[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void sum(const float* room, float* y) { y[threadIdx.x] = room[threadIdx.x] + room[63]; }
extern "C" __global__ void count(int* ticket, int* y) { y[threadIdx.x] = atomicAdd(ticket, 1); }
"""


@pytest.mark.parametrize("order", [Order(), Order(seed=7)], ids=str)
def test_a_read_of_memory_that_no_launch_wrote_is_reported(order: Order) -> None:
    x, room, y = torch.randn(64), torch.zeros(64), torch.zeros(64)
    fill, total = build(STEPS, "fill", checks=True), build(STEPS, "sum", checks=True)
    for count in (64, 63):
        unwritten = Unwritten([(room.data_ptr(), 256), (y.data_ptr(), 256)])
        launch(fill, 1, 64, (x, room, count), order=order, unwritten=unwritten)
        if count == 64:
            launch(total, 1, 64, (room, y), order=order, unwritten=unwritten)
            assert torch.equal(y, x + x[63])
        else:
            with pytest.raises(
                TwinError, match="kernel.cu:5: .*reads byte 252 of buffer 0, which nothing wrote"
            ):
                launch(total, 1, 64, (room, y), order=order, unwritten=unwritten)
    launch(total, 1, 64, (room, y))  # nothing was declared


def test_an_uncleared_counter_is_reported() -> None:
    ticket, y = torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    kernel = build(STEPS, "count", checks=True)
    launch(kernel, 1, 32, (ticket, y))
    with pytest.raises(TwinError, match="reads byte 0 of buffer 0, which nothing wrote"):
        launch(kernel, 1, 32, (ticket, y), unwritten=Unwritten([(ticket.data_ptr(), 4)]))


def test_a_recipe_without_its_first_step_reads_an_unwritten_workspace(seed: int) -> None:
    problem, operation = BatchStatisticsProblem(2, 4, 5, 3), OPERATIONS["batch_statistics"]
    recipe = operation.ladder.rung("split").recipe(problem, SplitConfig(64, 1, 16))
    tensors = {"x": operation.inputs(problem, torch.device("cpu"), seed)["x"]}
    tensors["y"] = operation.output(problem, torch.device("cpu"))
    for _ in range(2):
        bind(recipe, tensors, options=TwinOptions(checks=True))()
    bind(recipe, tensors, options=TwinOptions(checks=True, unwritten=("y",)))()
    with pytest.raises(TwinError, match=r"reads byte \d+ of buffer 0, which nothing wrote"):
        bind(recipe, tensors, options=TwinOptions(checks=True, unwritten=("x",)))()
    given = {
        workspace.name: torch.zeros(workspace.bytes, dtype=torch.uint8) for workspace in recipe.workspaces
    }
    late = replace(recipe, steps=recipe.steps[1:])
    for workspaces in ({}, given):  # the executable's own, or the caller's
        with pytest.raises(TwinError, match=r"reads byte \d+ of buffer \d+, which nothing wrote"):
            bind(late, tensors | workspaces, options=TwinOptions(checks=True))()
    filled = replace(late, filled=frozenset(given))  # by a recipe that ran earlier
    bind(filled, tensors | given, options=TwinOptions(checks=True))()


# ---------------------------------------------------------------- single bytes

BYTES = r"""
extern "C" __global__ void bytes(const unsigned char* x, unsigned char* y) {
    __shared__ unsigned char tile[64];
    const int i = threadIdx.x;
    tile[i] = x[i];
    __syncthreads();
    y[i] = tile[i ^ 1];
}
"""
BYTE_BUGS = {
    "one byte unwritten": (
        ("tile[i] = x[i];", "if (i != 37) tile[i] = x[i];"),
        "tile+37, which nothing wrote",
    ),
    "the first byte of a pair unwritten": (
        ("tile[i] = x[i];", "if (i != 36) tile[i] = x[i];"),
        "tile+36, which",
    ),
    "no barrier": (("__syncthreads();", ""), ""),
    "a read of a byte whose neighbor was written later": (
        ("__syncthreads();", "if (i == 40) y[64] = tile[0]; __syncthreads();"),
        "race: reads shared tile+0, which thread 0 of block (0, 0, 0) wrote",
    ),
    "a write of a byte whose neighbor was read later": (
        ("y[i] = tile[i ^ 1];", "y[i] = tile[i]; if (i == 40) tile[0] = 1;"),
        "race: writes shared tile+0, which thread 0 of block (0, 0, 0) read",
    ),
    "one byte past the end of shared memory": (
        ("= tile[i ^ 1]", "= tile[i + 1]"),
        "past the end of tile (64 bytes)",
    ),
    "one byte past the end of a buffer": (
        ("y[i] = tile", "y[i + 2] = tile"),
        "0 bytes past the end of buffer 1",
    ),
    "two blocks, one byte": (("y[i] = tile", "y[blockIdx.x + i] = tile"), "race: writes byte 1 of buffer 1"),
}


def test_bytes_of_different_threads_do_not_race() -> None:
    x, y = torch.randint(256, (64,), dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8)
    for order in ORDERS:
        launch(build(BYTES, "bytes", checks=True), 1, 64, (x, y), order=order)
        assert torch.equal(y[:64].view(32, 2).flip(1), x.view(32, 2))


@pytest.mark.parametrize("bug", BYTE_BUGS)
def test_a_bug_of_single_bytes_is_reported(bug: str) -> None:
    edit, expected = BYTE_BUGS[bug]
    x, y = torch.zeros(64, dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8)
    assert expected in report_of(planted(BYTES, edit), "bytes", 2 if "blocks" in bug else 1, 64, (x, y))


def test_a_byte_that_was_left_out_is_unwritten() -> None:
    x, y = torch.zeros(64, dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8)
    kernel = build(planted(BYTES, ("y[i] = tile", "if (i != 7) y[i] = tile")), "bytes", checks=True)
    launch(kernel, 1, 64, (x, y))
    assert kernel.unwritten(y.data_ptr(), 65) == [7, 64]


def test_threads_that_launch_at_once_know_each_of_their_own_launch() -> None:
    """All launch, then all query: a thread's launch information is not replaced by another's."""
    kernel, together = build(COPY, "copy", checks=True), threading.Barrier(4)

    def work(number: int) -> None:
        for _ in range(10):
            x, y = torch.zeros(16), torch.zeros(16)
            launch(kernel, 1, 10 + number, (x, y, 0, 0))
            together.wait(60)
            assert kernel.unwritten(y.data_ptr(), 64, 4) == list(range(10 + number, 16))

    in_threads(work, together.parties)
