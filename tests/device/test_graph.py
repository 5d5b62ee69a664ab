"""CUDA graphs whose kernels get new addresses between replays, on a fake driver and a fake GPU."""

from __future__ import annotations

import ctypes
import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from escalade.device import cuda
from escalade.device import graph as graphs
from escalade.device.arguments import ArgumentList, BufferPointers
from escalade.device.graph import CapturedGraph, ChainedGraph, GraphNode
from escalade.device.recipe import Buffer, KernelCall
from escalade.errors import LaunchError
from tests.fake_cuda import Gpu

OK, NO_CONTEXT = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
INVALID = driver.CUresult.CUDA_ERROR_INVALID_VALUE


class Driver:
    """Executable graph: each node's pointers, as last updated."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.pointers: dict[int, tuple[int, ...]] = {}
        self.counts: dict[int, int] = {}
        self.ran: list[tuple[int, ...]] = []
        self.answers: list[Any] = []
        self.contexts: list[int] = []
        self.parameters: dict[int, Any] = {}
        monkeypatch.setattr(driver, "cuGraphKernelNodeGetParams", self.get)
        monkeypatch.setattr(graphs, "gil_holding_function", lambda name: getattr(self, name))
        monkeypatch.setattr(driver, "cuGetErrorName", lambda status: (OK, b"NAME"))
        monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (OK, b"what it means"))
        monkeypatch.setattr("escalade.device.driver.make_context_current", self.contexts.append)
        monkeypatch.setattr("tests.fake_cuda.Graph.raw_cuda_graph_exec", lambda graph: 7, raising=False)
        monkeypatch.setattr("tests.fake_cuda.Graph.replay", lambda graph: self.replay(), raising=False)

    def launch(self, node: int, *buffers: str) -> GraphNode:
        arguments = ArgumentList(tuple(map(Buffer, buffers)), lambda tensor_map, address: b"")
        launch: Any = SimpleNamespace(arguments=arguments, what=f"launching {node}", device_index=3)
        return GraphNode(launch, node)

    def record(self, *nodes: GraphNode) -> CapturedGraph:
        graph = CapturedGraph(lambda: nodes, self.gpu.stream())  # type: ignore[arg-type]
        for node in nodes:
            self._copy(node.handle, ctypes.addressof(node.launch.arguments.addresses))
        self.counts.clear()
        return graph

    def get(self, node: int) -> tuple[Any, Any]:
        number = len(self.parameters) + 1
        self.parameters[number] = SimpleNamespace(getPtr=lambda: number)
        return OK, self.parameters[number]

    def cuGraphExecKernelNodeSetParams(
        self, executable: ctypes.c_void_p, node: ctypes.c_void_p, parameters: ctypes.c_void_p
    ) -> int:
        assert executable.value == 7 and node.value and parameters.value
        answer = self.answers.pop(0) if self.answers else OK
        if answer is OK:
            self._copy(node.value, self.parameters[parameters.value].kernelParams)
        return int(answer)

    def _copy(self, node: int, address: int) -> None:
        rooms = (ctypes.c_void_p * 2).from_address(address)
        self.pointers[node] = tuple(ctypes.c_void_p.from_address(room or 0).value or 0 for room in rooms)
        self.counts[node] = self.counts.get(node, 0) + 1

    def replay(self) -> None:
        """Updates after the launch do not affect it, even if it runs later."""
        now = tuple(pointer for node in sorted(self.pointers) for pointer in self.pointers[node])
        self.gpu.current.enqueue(lambda: self.ran.append(now))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Driver:
    gpu = Gpu(0)
    gpu.stand_in(monkeypatch)
    return Driver(gpu, monkeypatch)


def test_only_changed_nodes_are_updated_and_each_launch_at_once(made: Driver) -> None:
    first, second = made.launch(1, "x", "y"), made.launch(2, "y", "z")
    graph = made.record(first, second)
    pointers = {name: BufferPointers() for name in "xyz"}
    for name, each in pointers.items():
        for node in (first, second):
            each.add(node.launch.arguments, name)

    def point(**addresses: int) -> None:
        for name, address in addresses.items():
            if pointers[name].point(address):
                graph.change(pointers[name].launches)

    for addresses, counts in (
        ({"x": 16, "y": 32, "z": 48}, {1: 1, 2: 1}),
        ({"x": 16, "y": 32, "z": 48}, {}),
        ({"x": 64}, {1: 1}),
        ({"z": 80}, {2: 1}),
        ({"y": 96, "z": 48}, {1: 1, 2: 1}),
    ):
        made.counts.clear()
        point(**addresses)
        graph.replay()
        assert made.counts == counts
    made.gpu.synchronize()
    assert made.ran == [
        (16, 32, 32, 48), (16, 32, 32, 48), (64, 32, 32, 48), (64, 32, 32, 80), (64, 96, 96, 48),
    ]  # fmt: skip


def test_a_refusal_of_the_driver_is_reported_and_retried(made: Driver) -> None:
    node = made.launch(1, "x", "y")
    graph = made.record(node)
    node.launch.arguments.point({"x": 16, "y": 32})
    graph.change([node.launch.arguments])
    made.answers = [INVALID]
    with pytest.raises(LaunchError, match="launching 1: updating its arguments: NAME"):
        graph.replay()
    graph.replay()
    made.gpu.synchronize()
    assert made.ran == [(16, 32)]


def test_a_thread_without_a_context_gets_one(made: Driver) -> None:
    node = made.launch(1, "x", "y")
    graph = made.record(node)
    node.launch.arguments.point({"x": 16, "y": 32})
    graph.change([node.launch.arguments])
    made.answers = [NO_CONTEXT]
    graph.replay()
    made.gpu.synchronize()
    assert made.contexts == [3] and made.ran == [(16, 32)]


def test_a_launch_knows_its_node_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch would depend on it, and on nothing else."""

    def info(stream: int) -> tuple[Any, ...]:
        return OK, "active", 5, "graph", [f"node on {stream}"], ["edge"], 1

    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", info)
    launch = cuda.CudaLaunch.__new__(cuda.CudaLaunch)
    vars(launch).update(_stream=77, what="launching")
    assert launch.node() == "node on 77"


class Chained:
    """Driver that builds graphs node by node, and records its calls and the existing graphs."""

    def __init__(self, made: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = set[int]()
        self.launched: list[tuple[int | None, int | None]] = []
        self.answers: list[int] = []
        for name, answer in (("cuGraphCreate", 5), ("cuGraphInstantiate", 7)):
            monkeypatch.setattr(driver, name, partial(self._make, answer))
        for name in ("cuGraphDestroy", "cuGraphExecDestroy"):
            monkeypatch.setattr(driver, name, self.alive.remove)
        monkeypatch.setattr(graphs, "driver_function", lambda name: getattr(self, name))
        monkeypatch.setattr(graphs.FAST_PATHS, "current_stream", lambda index: 10 * index)

    def _make(self, handle: int, *given: Any) -> tuple[Any, int]:
        self.alive.add(handle)
        return OK, handle

    def cuGraphLaunch(self, graph: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.launched.append((graph.value, stream.value))
        return self.answers.pop(0) if self.answers else 0

    def launch(self, made: Driver, number: int, edges: list[tuple[int, int | None]]) -> Any:
        def add_to_graph(graph: int, behind: int | None) -> int:
            assert graph == 5
            edges.append((number, behind))
            return number

        node = made.launch(number, "x", "y")
        vars(node.launch)["add_to_graph"] = add_to_graph
        return node.launch


@pytest.fixture
def chained(made: Driver, monkeypatch: pytest.MonkeyPatch) -> Chained:
    return Chained(made, monkeypatch)


def test_launches_are_chained_without_recording(made: Driver, chained: Chained) -> None:
    edges: list[tuple[int, int | None]] = []
    launches = [chained.launch(made, number, edges) for number in (1, 2, 3)]
    graph = ChainedGraph(launches)
    assert edges == [(1, None), (2, 1), (3, 2)] and chained.alive == {5, 7}
    launches[1].arguments.point({"x": 16, "y": 32})
    graph.change([launches[1].arguments])
    graph.replay()
    assert made.counts == {2: 1} and made.pointers[2] == (16, 32) and chained.launched == [(7, 30)]
    del graph
    gc.collect()
    assert not chained.alive


def test_a_chain_that_cannot_be_made_leaves_nothing(made: Driver, chained: Chained) -> None:
    launch = chained.launch(made, 1, [])

    def refused(graph: int, behind: int | None) -> int:
        raise LaunchError("no room")

    vars(launch)["add_to_graph"] = refused
    with pytest.raises(LaunchError, match="no room"):
        ChainedGraph([launch])
    gc.collect()
    assert not chained.alive


def test_a_chain_runs_on_the_current_stream(made: Driver, chained: Chained) -> None:
    """In the device's context, if a thread has none yet."""
    graph = ChainedGraph([chained.launch(made, 1, [])])
    chained.answers = [0, int(NO_CONTEXT), 0, int(INVALID)]
    graph.replay()
    assert chained.launched == [(7, 30)] and not made.contexts
    graph.replay()
    assert chained.launched == [(7, 30)] * 3 and made.contexts == [3]
    with pytest.raises(LaunchError, match="launching a CUDA graph: NAME: what it means"):
        graph.replay()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_becomes_a_node_behind_another(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grid, block and cluster are passed on; if it may start before the other ends, the edge is programmatic."""
    told: dict[str, Any] = {}

    def add(graph: Any, dependencies: Any, number: int, parameters: Any) -> tuple[Any, int]:
        told["sizes"] = (
            parameters.gridDimX,
            parameters.blockDimX,
            parameters.sharedMemBytes,
            int(parameters.kern),
        )
        return OK, 9

    def depend(graph: Any, before: Any, behind: Any, edges: Any, number: int) -> tuple[Any]:
        told["edge"] = (before, behind, edges[0].from_port, int(edges[0].type))
        return (OK,)

    def attribute(node: int, kind: Any, value: Any) -> tuple[Any]:
        told["cluster"] = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
        return (OK,)

    monkeypatch.setattr(driver, "cuGraphAddKernelNode", add)
    monkeypatch.setattr(driver, "cuGraphAddDependencies", depend)
    monkeypatch.setattr(driver, "cuGraphKernelNodeSetAttribute", attribute)
    monkeypatch.setattr(cuda, "driver_function", lambda name: lambda *given: 0)
    kernel: Any = SimpleNamespace(handle=driver.CUkernel(6), allow_shared=lambda *given: None)
    program: Any = "kernel"
    call = KernelCall(
        program, (4, 1, 1), (128, 1, 1), (), shared_bytes=64, cluster=(2, 1, 1), overlap=overlap
    )
    launch = cuda.CudaLaunch(call, 0, "", kernel)
    assert launch.add_to_graph("graph", None) == 9 and "edge" not in told
    assert launch.add_to_graph("graph", 8) == 9
    assert told == {
        "sizes": (4, 128, 64, 6),
        "cluster": (2, 1, 1),
        "edge": ([8], [9], int(overlap), int(overlap)),
    }
