"""From a recipe to a run on the twin: arguments, buffers, workspaces, constants."""

from __future__ import annotations

import ctypes

import pytest
import torch

from escalade.device import cuda
from escalade.device.arguments import ArgumentList, BufferPointers
from escalade.device.program import Program, Type
from escalade.device.recipe import (
    Addresses,
    Argument,
    Buffer,
    ConstantCopy,
    Int64,
    Ints,
    KernelCall,
    Recipe,
    Workspace,
)
from escalade.device.run import Executable, TwinOptions, bind
from escalade.device.twin import Order
from escalade.device.twin.tensor_map import encode
from escalade.errors import CompileError, LaunchError, TwinError, UnsupportedError
from tests.device.conftest import Write

CPU = torch.device("cpu")
COUNT = 100

SCALE = """// y = x * scale + shift[i % 4], by way of a workspace
__constant__ float shift[4];

struct Sizes { int count, step; };

extern "C" __global__ void scale(const float* x, float* scratch, float* y, const float* extra, Sizes sizes, int times,
                                 long long big, float factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= sizes.count) return;
    scratch[i] = x[i * sizes.step] * factor * times;
    y[i] = scratch[i] + shift[i % 4] + (extra ? extra[i] : 0.f) + (big == (1LL << 40) ? 0.f : 1e6f);
}
"""
PROGRAM = Program.of("scale.cu", "scale")


def call(source: str = "x", scratch: str = "scratch", **changes: object) -> KernelCall:
    arguments: tuple[Argument, ...] = (
        Buffer(source),
        Buffer(scratch),
        Buffer("y"),
        Buffer("extra", optional=True),
        Ints((COUNT, 1)),
        3,
        Int64(1 << 40),
        0.5,
    )
    fields = {"grid": (4, 1, 1), "block": (32, 1, 1), "arguments": arguments, **changes}
    return KernelCall(PROGRAM, **fields)  # type: ignore[arg-type]


SHIFT = ConstantCopy(PROGRAM, "shift", Buffer("shift"), 16)
RECIPE = Recipe((SHIFT, call()), (Workspace("scratch", 4 * COUNT),))


@pytest.fixture
def scale_kernel(write_kernel: Write) -> Write:
    write_kernel("scale.cu", SCALE)
    return write_kernel


def named(**more: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    return {"x": torch.randn(COUNT), "shift": torch.arange(4.0), "y": torch.full((COUNT,), torch.nan), **more}


def expected(tensors: dict[str, torch.Tensor | None]) -> torch.Tensor:
    x, shift, extra = (tensors.get(name) for name in ("x", "shift", "extra"))
    assert x is not None and shift is not None
    return x * 1.5 + shift.repeat(COUNT // 4) + (0 if extra is None else extra)


# --- arguments


def argument_list(*given: Argument) -> ArgumentList:
    return ArgumentList(given, encode)


def test_arguments_have_the_types_that_kernels_take() -> None:
    values = argument_list(Buffer("x"), 7, Int64(2**40), 0.5, Ints((1, 2, 3)), -1).values
    kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float, ctypes.Array, ctypes.c_int)
    for value, kind in zip(values, kinds, strict=True):
        assert isinstance(value, kind)
    assert [value.value for value in values if not isinstance(value, ctypes.Array)] == [
        None,
        7,
        2**40,
        0.5,
        -1,
    ]
    assert list(values[4]) == [1, 2, 3]


def test_a_table_of_addresses_is_pointed_as_buffers_are() -> None:
    table = Addresses((Buffer("x"), Buffer("y", 8), Buffer("x", 4)))
    arguments = argument_list(table, Buffer("y"))
    arguments.point({"x": 0x100, "y": 0x200})
    assert list(arguments.values[0]) == [0x100, 0x208, 0x104]
    pointers = BufferPointers()
    pointers.add(arguments, "x", 16)
    assert pointers.point(0x300) and list(arguments.values[0]) == [0x310, 0x208, 0x314]
    call = KernelCall(Program("a.cu", "a"), (1, 1, 1), (1, 1, 1), (table,))
    assert call.buffers == {"x", "y"}
    assert Recipe((call,)).remap({"x": Buffer("z", 2)}).steps[0].buffers == {"z", "y"}


def test_addresses_are_those_of_the_values() -> None:
    arguments = argument_list(7, 0.5)
    assert list(arguments.addresses) == [ctypes.addressof(value) for value in arguments.values]


def test_pointers_move_and_nothing_else_does() -> None:
    arguments = argument_list(Buffer("x"), Buffer("x", offset=64), Buffer("bias", optional=True), 7)
    before = list(arguments.addresses)
    arguments.point({"x": 4096, "bias": 8192, "unused": 1})
    assert [value.value for value in arguments.values] == [4096, 4160, 8192, 7]
    arguments.point({"x": 1 << 47})
    assert [value.value for value in arguments.values] == [1 << 47, (1 << 47) + 64, None, 7]
    assert list(arguments.addresses) == before


def test_a_missing_buffer_is_named_with_those_that_are_there() -> None:
    with pytest.raises(UnsupportedError, match=r"needs a tensor 'weight'"):
        argument_list(Buffer("weight")).point({"x": 1, "y": 2})


# --- recipes


def test_a_recipe_knows_its_programs_and_workspaces() -> None:
    assert RECIPE.programs == (PROGRAM,)
    assert Recipe(RECIPE.steps, (Workspace("a", 3), Workspace("b", 4))).workspace_bytes == 7


def test_a_recipe_runs(scale_kernel: Write) -> None:
    tensors = named()
    bind(RECIPE, tensors)()
    torch.testing.assert_close(tensors["y"], expected(tensors))


def test_the_twin_runs_lanes_one_after_another(scale_kernel: Write) -> None:
    recipe = Recipe((SHIFT, call(lane=2), call(lane=1), call()), RECIPE.workspaces)
    assert recipe.side_lanes == (1, 2) and RECIPE.side_lanes == ()
    tensors = named()
    bind(recipe, tensors)()
    torch.testing.assert_close(tensors["y"], expected(tensors))


def test_an_optional_buffer_may_be_there(scale_kernel: Write) -> None:
    tensors = named(extra=torch.randn(COUNT))
    bind(RECIPE, tensors)()
    torch.testing.assert_close(tensors["y"], expected(tensors))


def test_an_optional_buffer_may_be_none(scale_kernel: Write) -> None:
    tensors = named(extra=None)
    bind(RECIPE, tensors)()
    torch.testing.assert_close(tensors["y"], expected(tensors))


def test_a_needed_buffer_may_not_be_missing(scale_kernel: Write) -> None:
    tensors = named()
    del tensors["x"]
    with pytest.raises(UnsupportedError, match="needs a tensor 'x'"):
        bind(RECIPE, tensors)


def test_a_constant_needs_its_source_too(scale_kernel: Write) -> None:
    tensors = named()
    del tensors["shift"]
    with pytest.raises((UnsupportedError, KeyError), match="shift"):
        bind(RECIPE, tensors)


def test_a_workspace_may_be_given(scale_kernel: Write) -> None:
    scratch = torch.full((COUNT,), torch.nan)
    tensors = named(scratch=scratch)
    bind(RECIPE, tensors)()
    torch.testing.assert_close(scratch, tensors["x"] * 1.5)  # type: ignore[operator]


def test_an_executable_is_bound_again_and_again(scale_kernel: Write) -> None:
    executable = Executable(RECIPE, CPU)
    for extra in (None, torch.randn(COUNT), None):
        tensors = named(extra=extra)
        executable.bind(tensors)
        for _ in range(2):
            tensors["y"].fill_(torch.nan)  # type: ignore[union-attr]
            executable()
            torch.testing.assert_close(tensors["y"], expected(tensors))


def test_constants_follow_their_source(scale_kernel: Write) -> None:
    """Copied anew at each run: the caller or another recipe may have changed them."""
    tensors = named()
    executable = bind(RECIPE, tensors)
    executable()
    bind(RECIPE, named(shift=torch.full((4,), 100.0)))()
    tensors["shift"].add_(1)  # type: ignore[union-attr]
    executable()
    torch.testing.assert_close(tensors["y"], expected(tensors))


def test_a_constant_that_does_not_fit_is_refused(scale_kernel: Write) -> None:
    copy = ConstantCopy(PROGRAM, "shift", Buffer("shift"), 20)
    with pytest.raises(LaunchError, match="filling shift of scale.*20 bytes do not fit into 16"):
        Executable(Recipe((copy, call())), CPU)


def test_an_unknown_constant_is_refused(scale_kernel: Write) -> None:
    with pytest.raises(LaunchError, match="nonsense"):
        Executable(Recipe((ConstantCopy(PROGRAM, "nonsense", Buffer("shift"), 4), call())), CPU)


def test_offsets_are_bytes(scale_kernel: Write) -> None:
    recipe = Recipe((SHIFT, call()), (Workspace("scratch", 4 * COUNT),))
    shifted = call()
    arguments = (Buffer("x", offset=8), *shifted.arguments[1:])
    recipe = Recipe((SHIFT, call(arguments=arguments)), recipe.workspaces)
    tensors = named(x=torch.randn(COUNT + 2))
    bind(recipe, tensors)()
    torch.testing.assert_close(tensors["y"], expected({**tensors, "x": tensors["x"][2:]}))  # type: ignore[index]


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"\['cpu', 'meta'\]; all must be on one device"):
        bind(RECIPE, {"x": torch.ones(1), "y": torch.ones(1, device="meta")})


def test_no_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="on one device"):
        bind(RECIPE, {"x": None})


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="device meta is not supported"):
        Executable(RECIPE, torch.device("meta"))


# --- the twin's own errors, with the name of the kernel


def test_an_error_names_kernel_and_label(write_kernel: Write) -> None:
    write_kernel(
        "wild.cu",
        'extern "C" __global__ void wild(float* y, int count) { y[threadIdx.x + count] = 1.f; }\n',
    )
    step = KernelCall(Program.of("wild.cu", "wild"), (1, 1, 1), (32, 1, 1), (Buffer("y"), 100_000))
    with pytest.raises(TwinError, match=r"running wild of wild\.cu \(\) for the test on the twin: "):
        bind(Recipe((step,)), {"y": torch.zeros(32)}, "the test", TwinOptions(Order(seed=1), checks=True))()


def test_a_source_that_does_not_compile_is_named(write_kernel: Write) -> None:
    write_kernel("broken.cu", 'extern "C" __global__ void broken(float* y) { y[0] = z; }\n')
    step = KernelCall(Program.of("broken.cu", "broken"), (1, 1, 1), (32, 1, 1), (Buffer("y"),))
    with pytest.raises(CompileError, match=r"(?s)broken.*broken\.cu:1"):
        bind(Recipe((step,)), {"y": torch.zeros(32)})


def test_an_empty_grid_is_refused(scale_kernel: Write) -> None:
    recipe = Recipe((SHIFT, call(grid=(0, 1, 1))), RECIPE.workspaces)
    with pytest.raises(LaunchError, match="empty grid"):
        bind(recipe, named())()


def test_every_order_gives_the_same(scale_kernel: Write, seed: int) -> None:
    for options in (
        TwinOptions(),
        TwinOptions(Order(seed=seed)),
        TwinOptions(Order(seed=seed, late=True), True),
    ):
        tensors = named()
        bind(RECIPE, tensors, options=options)()
        torch.testing.assert_close(tensors["y"], expected(tensors))


def test_a_kernel_of_ours_runs_on_the_twin(seed: int) -> None:
    """The lowest rung called by hand, equivalent to its recipe."""
    x, weight, y = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3), torch.full((1, 1, 2, 2), torch.nan)
    program = Program.of(
        "conv2d/direct.cu",
        "conv2d_direct",
        {
            "Element": Type("float"),
            "NHWC": False,
            "HAS_BIAS": False,
            "HAS_RESIDUAL": False,
            "HAS_RELU": False,
        },
    )
    shape = Ints((1, 1, 4, 4, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1, 2, 2))
    arguments = (
        Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("residual", optional=True),
        Buffer("y"), Buffer("gain", optional=True), Buffer("shift", optional=True),
        Buffer("gate", optional=True), shape,
    )  # fmt: skip
    bind(
        Recipe((KernelCall(program, (1, 1, 1), (32, 1, 1), arguments),)), {"x": x, "weight": weight, "y": y}
    )()
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, weight))


# --- the GPU's code path, as far as possible without one


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_escalade_sync(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ESCALADE_SYNC", raising=False)
    if value is not None:
        monkeypatch.setenv("ESCALADE_SYNC", value)
    assert cuda.synchronize_after_each_launch() is on


def test_escalade_sync_does_not_touch_the_twin(scale_kernel: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_SYNC", "1")
    tensors = named()
    bind(RECIPE, tensors)()
    torch.testing.assert_close(tensors["y"], expected(tensors))


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_architectures(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert cuda.architecture(0) == name


def test_an_old_card_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(UnsupportedError, match=r"Tesla T4 has compute capability 7\.5.*8\.0 or newer"):
        cuda.architecture(0)
