"""One CUDA graph of many launches, whose kernels may be pointed at other memory from one replay to the next."""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from escalade.device.arguments import ArgumentList
from escalade.device.cuda import CudaLaunch
from escalade.device.driver import (
    check,
    check_status,
    driver_function,
    gil_holding_function,
    make_context_current,
)
from escalade.device.recording import capture_into
from escalade.device.torch_private import FAST_PATHS

_MAKING = "making a CUDA graph of launches"


@dataclass(frozen=True)
class GraphNode:
    """A launch, and what it has become in a CUDA graph."""

    launch: CudaLaunch
    handle: Any


class KernelGraph(ABC):
    """A CUDA graph, and the launches in it.

    Replays run over the arguments that launches had when the graph was made, until it is told that they are others:
    then the driver copies them into the executable graph before the next replay. Replays that were begun before keep
    theirs, also if they have not run yet.
    """

    def __init__(self, executable: int, nodes: Iterable[GraphNode]) -> None:
        self._nodes = {id(node.launch.arguments): _Updated(node, executable) for node in nodes}
        self._changed: dict[int, _Updated] = {}

    def change(self, launches: Iterable[ArgumentList]) -> None:
        """The next replay takes these arguments as they are then."""
        for arguments in launches:
            self._changed[id(arguments)] = self._nodes[id(arguments)]

    def replay(self) -> None:
        """Runs it on the current stream."""
        if self._changed:
            for node in self._changed.values():
                node.update()
            self._changed.clear()
        self._run()

    @abstractmethod
    def _run(self) -> None: ...


class CapturedGraph(KernelGraph):
    """A graph of whatever is enqueued while PyTorch records it."""

    def __init__(self, record: Callable[[], Iterable[GraphNode]], stream: torch.cuda.Stream) -> None:
        """`record` enqueues it, on `stream`, and says what has become of launches."""
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # or its nodes would be gone
        # Other threads may be using the engine meanwhile: what they allocate or wait for is no part of this.
        with capture_into(self._graph, stream, "thread_local"):
            nodes = tuple(record())
        self._graph.instantiate()
        super().__init__(self._graph.raw_cuda_graph_exec(), nodes)

    def _run(self) -> None:
        self._graph.replay()


class ChainedGraph(KernelGraph):
    """A graph of launches, each behind the one before it, made of them without recording: while one is recorded, who
    waits for the whole device spoils it, and is refused as well."""

    def __init__(self, launches: Sequence[CudaLaunch]) -> None:
        from cuda.bindings import driver

        graph = check(driver.cuGraphCreate(0), _MAKING)
        # What a process leaves when it ends, the driver frees.
        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        nodes: list[GraphNode] = []
        for launch in launches:
            behind = nodes[-1].handle if nodes else None
            nodes.append(GraphNode(launch, launch.add_to_graph(graph, behind)))
        executable = check(driver.cuGraphInstantiate(graph, 0), _MAKING)
        weakref.finalize(self, driver.cuGraphExecDestroy, executable).atexit = False
        super().__init__(int(executable), nodes)
        self._no_context = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._index = launches[0].device_index
        self._launch = partial(driver_function("cuGraphLaunch"), ctypes.c_void_p(int(executable)))

    def _run(self) -> None:
        stream = ctypes.c_void_p(FAST_PATHS.current_stream(self._index))
        status = self._launch(stream)
        if status == self._no_context:  # the thread's first use of CUDA is this launch
            make_context_current(self._index)
            status = self._launch(stream)
        if status:
            check_status(status, "launching a CUDA graph")


class _Updated:
    """A node whose arguments are copied into the executable graph, one driver call for all of a launch's."""

    def __init__(self, node: GraphNode, executable: int) -> None:
        from cuda.bindings import driver

        self._launch = node.launch
        self._what = f"{node.launch.what}: pointing it at other memory"
        self._no_context = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._parameters = check(driver.cuGraphKernelNodeGetParams(node.handle), self._what)
        self._parameters.kernelParams = ctypes.addressof(node.launch.arguments.addresses)
        addresses = (executable, int(node.handle), self._parameters.getPtr())
        self._set = partial(
            gil_holding_function("cuGraphExecKernelNodeSetParams"), *map(ctypes.c_void_p, addresses)
        )

    def update(self) -> None:
        status = self._set()
        if status == self._no_context:  # the thread's first use of CUDA is this call
            make_context_current(self._launch.device_index)
            status = self._set()
        if status:
            check_status(status, self._what)
