"""Faults and endless loops end in a report with thread and line; the process survives."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from escalade.device.twin import Order, TwinError, TwinKernel, build
from escalade.errors import LaunchError
from tests.device.twin.support import launch, line_of

SOURCE = r"""
enum { FINE, NULL_READ, NULL_WRITE, WILD, DIVIDE, REMAINDER, RECURSE, LARGE, SPIN, DOZE, COMPUTE,
       BARRIERS, TRAP, FLAG };
__noinline__ __device__ int depth(volatile int* stop, int level) {
    volatile int mine[16];  // the stack overflows here
    mine[level % 16] = level;
    return *stop ? level : depth(stop, level + 1) + mine[level % 16];
}
__noinline__ __device__ float large(int i, int zero) {
    volatile float many[100000];
    many[i] = 1.f;
    return many[i] + many[zero];
}
extern "C" __global__ void faulty(float* y, volatile int* flags, int mode, int zero, unsigned long long wild) {
    const int i = threadIdx.x + blockDim.x * blockIdx.x;
    __syncthreads();
    if (i == 37) {
        switch (mode) {
            case NULL_READ: y[i] = *(float*)(size_t)zero; break;
            case NULL_WRITE: *(float*)(size_t)(zero + 64) = 1.f; break;
            case WILD: *(float*)wild = 2.f; break;
            case DIVIDE: y[i] = i / zero; break;
            case REMAINDER: y[i] = (unsigned long long)i % (unsigned long long)zero; break;
            case RECURSE: y[i] = depth(flags, 0); break;
            case LARGE: y[i] = large(i, zero); break;
            case SPIN: while (flags[0] == 0) {} break;
            case DOZE: while (flags[0] == 0) __nanosleep(100); break;
            case COMPUTE: for (unsigned n = 1;; n += n) asm volatile("" :: "r"(n)); break;
            case TRAP: __builtin_trap(); break;
        }
    }
    if (mode == BARRIERS) for (;;) __syncthreads();
    if (mode == FLAG && blockIdx.x == 0) while (flags[0] == 0) {}
    if (mode == FLAG && i == gridDim.x * blockDim.x - 1) flags[0] = 1;
    y[i] = i;
}
"""
MODES = [name.strip() for name in SOURCE[SOURCE.index("{") + 1 : SOURCE.index("}")].split(",")]
WILD = 0x123456789000
HANDLED = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGINT)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checks"])
def kernel(request: pytest.FixtureRequest) -> TwinKernel:
    return build(SOURCE, "faulty", checks=request.param)


def _run(
    kernel: TwinKernel, mode: str, blocks: int = 2, limit_s: float = 0.3, order: Order = Order()
) -> torch.Tensor:
    y, flags = torch.full((blocks * 64,), -1.0), torch.zeros(1, dtype=torch.int32)
    values = (y, flags, MODES.index(mode), 0, ctypes.c_uint64(WILD))
    launch(kernel, blocks, 64, values, limit_s=limit_s, order=order)
    return y


REPORTS = {
    "NULL_READ": "0x0",
    "NULL_WRITE": "0x40",
    "WILD": f"{WILD:#x}",
    "DIVIDE": "divides an integer by zero",
    "REMAINDER": "divides an integer by zero",
    "TRAP": "executes a trap instruction",
}


@pytest.mark.parametrize("mode", REPORTS)
def test_a_fault_names_the_thread_and_the_line(kernel: TwinKernel, mode: str) -> None:
    with pytest.raises(TwinError) as caught:
        _run(kernel, mode)
    place = f"faulty: kernel.cu:{line_of(SOURCE, f'case {mode}')}: thread 37 of block (0, 0, 0): "
    assert str(caught.value).startswith(place)
    assert REPORTS[mode] in str(caught.value)
    assert _run(kernel, "FINE").tolist() == list(range(128))


@pytest.mark.parametrize("address", [1 << 62, 0x7FFF00000000DEAD])
def test_an_address_that_no_pointer_can_have_is_reported(kernel: TwinKernel, address: int) -> None:
    y, flags = torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TwinError, match="thread 37 of block"):
        launch(kernel, 1, 64, (y, flags, MODES.index("WILD"), 0, ctypes.c_uint64(address)))


@pytest.mark.parametrize("mode", ["RECURSE", "LARGE"])
def test_an_overflow_of_the_stack_is_reported(kernel: TwinKernel, mode: str) -> None:
    for order in (Order(), Order(seed=3)):
        with pytest.raises(
            TwinError, match="thread 37 of block .*overflows its stack: .* more than 256 KiB"
        ) as caught:
            _run(kernel, mode, order=order)
        assert str(caught.value).startswith("faulty: kernel.cu:")
    assert _run(kernel, "FINE").tolist() == list(range(128))


@pytest.mark.parametrize("mode", ["SPIN", "DOZE", "COMPUTE"])
def test_an_endless_loop_is_reported(kernel: TwinKernel, mode: str) -> None:
    with pytest.raises(
        TwinError, match=r"no thread of the block has returned in 0\.3 s of CPU time"
    ) as caught:
        _run(kernel, mode, blocks=1)
    place = f"kernel.cu:{line_of(SOURCE, f'case {mode}')}: thread 37 of block (0, 0, 0)"
    assert place in str(caught.value)
    # The last thread reached the barrier last, and continued.
    others = "0-36, 38-63" if mode == "DOZE" else "0-36, 63"
    assert f"threads {others} have returned" in str(caught.value)
    assert _run(kernel, "FINE").tolist() == list(range(128))


CALLS = r"""
extern "C" void toascii(int);
extern "C" __global__ void calls() {
    for (;;) { %s }
}
""" % (16 * "toascii(1); ")


def test_a_thread_on_the_way_to_another_library_has_a_line() -> None:
    """Such a call passes a linker stub, which has no line: more than half of all samples hit one."""
    kernel = build(CALLS, "calls")
    for _ in range(5):
        with pytest.raises(TwinError) as caught:
            launch(kernel, 1, 1, (), limit_s=0.02)
        assert str(caught.value).startswith(
            f"calls: kernel.cu:{line_of(CALLS, 'for (;;)')}: thread 0 of block"
        )


def test_barriers_for_ever_and_a_block_that_waits_for_a_later_one(kernel: TwinKernel) -> None:
    with pytest.raises(TwinError, match="no thread of the block has returned"):
        _run(kernel, "BARRIERS")
    if kernel.checks:  # these run on one core; on several, the later CTA may run
        with pytest.raises(TwinError, match="a wait for a block that starts only when this one has ended"):
            _run(kernel, "FLAG")


def test_a_long_run_that_gets_on_is_none_without_end(kernel: TwinKernel) -> None:
    """Each thread's loop is below the limit; their sum is far above it."""
    source = r"""
extern "C" __global__ void slow(float* y) {
    const long long start = clock64();
    while (clock64() - start < 20000000) {}
    y[threadIdx.x] = 1.f;
}"""
    slow, y = build(source, "slow", checks=kernel.checks), torch.zeros(32)
    launch(slow, 1, 32, (y,), limit_s=0.3)
    assert y.all()


def test_handlers_are_the_processs_own_again(kernel: TwinKernel) -> None:
    """Judged by the kernel's signal state: Python knows only handlers it has set itself."""

    def caught() -> str:
        with open("/proc/self/status") as status:
            return next(line for line in status if line.startswith("SigCgt"))

    before, mine = caught(), [signal.getsignal(number) for number in HANDLED]
    for mode in ("FINE", "WILD", "RECURSE", "COMPUTE"):
        with contextlib.suppress(TwinError):
            _run(kernel, mode)
        assert caught() == before
        assert [signal.getsignal(number) for number in HANDLED] == mine


def test_launches_of_several_threads_fault_each_for_itself(kernel: TwinKernel) -> None:
    found: list[str] = []

    def run(mode: str) -> None:
        try:
            found.append(f"{mode}: {_run(kernel, mode).sum().item():.0f}")
        except TwinError as error:
            found.append(f"{mode}: {'thread 37' in str(error)}")

    threads = [
        threading.Thread(target=run, args=(mode,)) for mode in ("WILD", "FINE", "RECURSE", "COMPUTE", "FINE")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["COMPUTE: True", "FINE: 8128", "FINE: 8128", "RECURSE: True", "WILD: True"]


def test_the_limit_is_a_number_of_seconds(kernel: TwinKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("soon", "-1", "nan", "1e12"):
        monkeypatch.setenv("ESCALADE_TWIN_LIMIT", wrong)
        with pytest.raises(
            LaunchError, match="ESCALADE_TWIN_LIMIT is .* a number of seconds, .* or 0 for no limit"
        ):
            launch(kernel, 1, 64, (torch.zeros(64), torch.zeros(1, dtype=torch.int32), 0, 0, 0))


def test_ctrl_c_ends_a_launch(kernel: TwinKernel) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    began = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        timer.start()  # inside the loop: on a busy machine it may end before the launch starts
        _run(kernel, "COMPUTE", limit_s=60)
    timer.join()
    assert time.process_time() - began < 30
    assert _run(kernel, "FINE").tolist() == list(range(128))


def test_ctrl_c_that_is_ignored_ends_no_launch(kernel: TwinKernel) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(TwinError, match="no thread of the block has returned"):
            _run(kernel, "COMPUTE")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


OTHERS_FAULT = """
import ctypes, faulthandler, sys
faulthandler.enable()
import torch
from tests.device.twin.test_faults import SOURCE, _run
from escalade.device.twin import TwinError, build
kernel = build(SOURCE, "faulty")
for mode in ("WILD", "RECURSE", "FINE"):
    try:
        _run(kernel, mode)
    except TwinError:
        print("reported", flush=True)
ctypes.string_at(8)
"""


def test_a_fault_of_others_is_left_to_the_handler_before() -> None:
    """Python's faulthandler prints its trace, and the signal ends the process, as without the twin."""
    done = subprocess.run([sys.executable, "-c", OTHERS_FAULT], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["reported", "reported"]
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr
    assert faulthandler.is_enabled()  # also under pytest
