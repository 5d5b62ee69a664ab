"""CUDA graphs whose kernel arguments can change between replays."""

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
from escalade.device.driver import check, driver_function, gil_holding_function, retry
from escalade.device.recording import capture_into
from escalade.device.torch_private import FAST_PATHS

_CREATING = "creating a CUDA graph"


@dataclass(frozen=True)
class GraphNode:
    """Launch and its node in a CUDA graph."""

    launch: CudaLaunch
    handle: Any


class KernelGraph(ABC):
    """Executable CUDA graph and the launches in it.

    Replays use the arguments of the time of instantiation until `change` marks launches: the next replay first copies
    their new arguments into the executable graph. Replays already in flight keep their own arguments.
    """

    def __init__(self, executable: int, nodes: Iterable[GraphNode]) -> None:
        self._nodes = {id(node.launch.arguments): _NodeUpdate(node, executable) for node in nodes}
        self._changed: dict[int, _NodeUpdate] = {}

    def change(self, launches: Iterable[ArgumentList]) -> None:
        """Mark launches whose arguments the next replay must update."""
        for arguments in launches:
            self._changed[id(arguments)] = self._nodes[id(arguments)]

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        if self._changed:
            for node in self._changed.values():
                node.update()
            self._changed.clear()
        self._run()

    @abstractmethod
    def _run(self) -> None: ...


class CapturedGraph(KernelGraph):
    """Graph made by stream capture, so it may contain PyTorch operators."""

    def __init__(self, record: Callable[[], Iterable[GraphNode]], stream: torch.cuda.Stream) -> None:
        """Capture what `record` enqueues on `stream`; `record` returns the nodes of the launches."""
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # otherwise PyTorch frees the nodes
        # thread_local: other threads may use the engine meanwhile, and what they allocate must not end the capture.
        with capture_into(self._graph, stream, "thread_local"):
            nodes = tuple(record())
        self._graph.instantiate()
        super().__init__(self._graph.raw_cuda_graph_exec(), nodes)

    def _run(self) -> None:
        self._graph.replay()


class ChainedGraph(KernelGraph):
    """Chain of launches, built with the graph API instead of capture.

    A device-wide synchronization in another thread would fail during a capture, and invalidate it.
    """

    def __init__(self, launches: Sequence[CudaLaunch]) -> None:
        from cuda.bindings import driver

        graph = check(driver.cuGraphCreate(0), _CREATING)
        # Not at exit: the driver frees everything when the process ends.
        weakref.finalize(self, driver.cuGraphDestroy, graph).atexit = False
        nodes: list[GraphNode] = []
        for launch in launches:
            behind = nodes[-1].handle if nodes else None
            nodes.append(GraphNode(launch, launch.add_to_graph(graph, behind)))
        executable = check(driver.cuGraphInstantiate(graph, 0), _CREATING)
        weakref.finalize(self, driver.cuGraphExecDestroy, executable).atexit = False
        super().__init__(int(executable), nodes)
        self._index = launches[0].device_index
        self._launch = partial(driver_function("cuGraphLaunch"), ctypes.c_void_p(int(executable)))

    def _run(self) -> None:
        stream = ctypes.c_void_p(FAST_PATHS.current_stream(self._index))
        if status := self._launch(stream):
            retry(partial(self._launch, stream), status, self._index, "launching a CUDA graph")


class _NodeUpdate:
    """Prepared driver call that copies all arguments of one launch into the executable graph."""

    def __init__(self, node: GraphNode, executable: int) -> None:
        from cuda.bindings import driver

        self._launch = node.launch
        self._what = f"{node.launch.what}: updating its arguments"
        self._parameters = check(driver.cuGraphKernelNodeGetParams(node.handle), self._what)
        self._parameters.kernelParams = ctypes.addressof(node.launch.arguments.addresses)
        addresses = (executable, int(node.handle), self._parameters.getPtr())
        self._set = partial(
            gil_holding_function("cuGraphExecKernelNodeSetParams"), *map(ctypes.c_void_p, addresses)
        )

    def update(self) -> None:
        if status := self._set():
            retry(self._set, status, self._launch.device_index, self._what)
