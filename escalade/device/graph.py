"""One CUDA graph of many launches, whose kernels may be pointed at other memory from one replay to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from escalade.device.arguments import ArgumentList
from escalade.device.cuda import CudaLaunch
from escalade.device.driver import brief_function, check, check_status, make_context_current
from escalade.device.pytorch import WORDS
from escalade.device.recording import recorded


@dataclass(frozen=True)
class GraphNode:
    """A launch, and what it has become in a CUDA graph."""

    launch: CudaLaunch
    handle: Any


class RecordedGraph:
    """A CUDA graph, and the launches in it.

    Replays run over the arguments that launches had when the graph was recorded, until it is told that they are others:
    then the driver copies them into the executable graph before the next replay. Replays that were begun before keep
    theirs, also if they have not run yet.
    """

    def __init__(
        self,
        record: Callable[[], Iterable[GraphNode]],
        stream: torch.cuda.Stream,
        *,
        launches_only: bool = False,
    ) -> None:
        """`record` makes the launches, on `stream`, and says what has become of them. With `launches_only` there is
        nothing else in it: nothing draws random numbers, which PyTorch would have to be told of."""
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # or its nodes would be gone
        # Other threads may be using the engine meanwhile: what they allocate or wait for is no part of this.
        with recorded(self._graph, stream, "thread_local"):
            nodes = tuple(record())
        self._graph.instantiate()
        self._nodes = {id(node.launch.arguments): _Updated(node, self._graph) for node in nodes}
        self._changed: dict[int, _Updated] = {}
        self._brief = _Brief(nodes[0].launch, self._graph) if launches_only and nodes else self._graph.replay

    def change(self, launches: Iterable[ArgumentList]) -> None:
        """The next replay takes these arguments as they are then."""
        for arguments in launches:
            self._changed[id(arguments)] = self._nodes[id(arguments)]

    def replay(self, is_idle: bool = False) -> None:
        """Runs it on the current stream; `is_idle` says that no replay of it is under way."""
        if self._changed:
            for node in self._changed.values():
                node.update()
            self._changed.clear()
        if is_idle:
            self._brief()
        else:
            self._graph.replay()


class _Brief:
    """A launch on the current stream that finds room in the driver's queue: it keeps the interpreter's lock."""

    def __init__(self, launch: CudaLaunch, graph: torch.cuda.CUDAGraph) -> None:
        from cuda.bindings import driver

        self._index = launch.device_index
        self._no_context = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._launch = partial(brief_function("cuGraphLaunch"), ctypes.c_void_p(graph.raw_cuda_graph_exec()))

    def __call__(self) -> None:
        stream = ctypes.c_void_p(WORDS.current_stream(self._index))
        status = self._launch(stream)
        if status == self._no_context:  # the thread's first use of CUDA is this launch
            make_context_current(self._index)
            status = self._launch(stream)
        if status:
            check_status(status, "launching a CUDA graph")


class _Updated:
    """A node whose arguments are copied into the executable graph, one driver call for all of a launch's."""

    def __init__(self, node: GraphNode, graph: torch.cuda.CUDAGraph) -> None:
        from cuda.bindings import driver

        self._launch = node.launch
        self._what = f"{node.launch.what}: pointing it at other memory"
        self._no_context = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._parameters = check(driver.cuGraphKernelNodeGetParams(node.handle), self._what)
        self._parameters.kernelParams = ctypes.addressof(node.launch.arguments.addresses)
        addresses = (graph.raw_cuda_graph_exec(), int(node.handle), self._parameters.getPtr())
        self._set = partial(
            brief_function("cuGraphExecKernelNodeSetParams"), *map(ctypes.c_void_p, addresses)
        )

    def update(self) -> None:
        status = self._set()
        if status == self._no_context:  # the thread's first use of CUDA is this call
            make_context_current(self._launch.device_index)
            status = self._set()
        if status:
            check_status(status, self._what)
