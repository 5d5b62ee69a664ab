"""Kernels on the GPU: loading, and launches with everything but stream and pointers prepared ahead."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from escalade.device.architecture import name_of
from escalade.device.arguments import ArgumentList
from escalade.device.driver import check, driver_function, retry
from escalade.device.nvrtc import Cubin, Resources, compile_program
from escalade.device.program import Program
from escalade.device.recipe import ConstantCopy, KernelCall
from escalade.device.streams import dedicated_stream
from escalade.device.tensor_map import encode
from escalade.device.torch_private import FAST_PATHS
from escalade.errors import LaunchError, UnsupportedError


def architecture(device_index: int) -> str:
    """Return the architecture to compile for. Hopper's wgmma and TMA instructions need the `a` in sm_90a."""
    major, minor = torch.cuda.get_device_capability(device_index)
    if major < 8:
        name = torch.cuda.get_device_name(device_index)
        raise UnsupportedError(f"{name} has compute capability {major}.{minor}; Escalade needs 8.0 or newer")
    return name_of((major, minor))


def architecture_of(device: torch.device) -> str | None:
    """Return the architecture of a CUDA device; None for the CPU, where the twin runs."""
    return architecture(index_of(device)) if device.type == "cuda" else None


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device; that of the current device if it has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


@dataclass(frozen=True)
class CudaKernel:
    """Loaded program; `handle` is valid in every context of the process."""

    program: Program
    library: Any
    handle: Any
    cubin: Cubin
    _allowed: dict[str, int] = field(default_factory=dict, compare=False)
    _constants: dict[str, tuple[Any, int]] = field(default_factory=dict, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    @property
    def resources(self) -> Resources:
        return self.cubin.resources

    def allow_shared(self, bytes: int, device_index: int, what: str) -> None:
        """Raise the kernel's limit of dynamic shared memory, as required above 48 KiB of static and dynamic together.

        The limit belongs to the kernel, not to a launch, so it is never lowered.
        """
        from cuda.bindings import driver

        with self._lock:
            if bytes <= self._allowed.get("bytes", 0):
                return
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = check(driver.cuDeviceGet(device_index), "finding the device")
            check(driver.cuKernelSetAttribute(attribute, bytes, self.handle, device), what)
            self._allowed["bytes"] = bytes

    def constant(self, symbol: str, device_index: int, what: str) -> tuple[Any, int]:
        """Return the address and size of a `__constant__` array of this copy, cached."""
        from cuda.bindings import driver

        with self._lock:
            if symbol not in self._constants:
                with torch.cuda.device(device_index):
                    found = check(driver.cuLibraryGetGlobal(self.library, symbol.encode()), what)
                self._constants[symbol] = found
            return self._constants[symbol]

    def like(self, other: CudaKernel, device_index: int) -> CudaKernel:
        """Prepare this copy for the same launches as `other`, because attributes cannot be set during capture."""
        what = f"preparing a copy of {self.program}"
        self.allow_shared(other._allowed.get("bytes", 0), device_index, what)
        for symbol in tuple(other._constants):
            self.constant(symbol, device_index, what)
        return self

    def occupancy(self, threads: int, shared_bytes: int) -> int:
        """Return the number of CTAs of this kernel that fit on an SM at the same time."""
        from cuda.bindings import driver

        function = check(driver.cuKernelGetFunction(self.handle), f"finding {self.program}")
        return check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes),
            f"querying the occupancy of {self.program}",
        )


_loaded: dict[tuple[Program, int], CudaKernel] = {}
_loading: dict[tuple[Program, int], threading.Lock] = {}
_noting: list[set[Program]] = []


@contextmanager
def track_programs() -> Iterator[set[Program]]:
    """Yield a set that collects the programs passed to `load`, by any thread, loaded before or not."""
    found: set[Program] = set()
    _noting.append(found)
    try:
        yield found
    finally:
        _noting.remove(found)


def load(program: Program, device_index: int) -> CudaKernel:
    """Compile and load a program once per device; never unloaded."""
    for found in _noting:
        found.add(program)
    key = (program, device_index)
    if key not in _loaded:
        with _loading.setdefault(key, threading.Lock()):  # two copies would have separate constant memories
            if key not in _loaded:
                _loaded[key] = load_copy(program, device_index)
    return _loaded[key]


def load_copy(program: Program, device_index: int) -> CudaKernel:
    """Load another copy, with its own constant memory."""
    from cuda.bindings import driver

    torch.cuda.init()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        cubin = compile_program(program, architecture(device_index))
        library = check(driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0), f"loading {program}")
        handle = check(driver.cuLibraryGetKernel(library, program.entry.encode()), f"finding {program}")
        # Load it onto the device now; the driver would do it at the first launch.
        check(driver.cuKernelGetFunction(handle), f"loading {program}")
    return CudaKernel(program, library, handle, cubin)


_LAUNCHED = (
    "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes",
)  # fmt: skip
"""Fields that launch configs and graph nodes share."""


class CudaLaunch:
    """Kernel launch on one device; only stream and pointers change between calls."""

    def __init__(
        self, call: KernelCall, device_index: int, label: str, kernel: CudaKernel | None = None
    ) -> None:
        self._current_stream = FAST_PATHS.current_stream
        self._current_device = FAST_PATHS.current_device
        self.what = f"launching {call.program}{label}"
        self.kernel = kernel or load(call.program, device_index)
        self.arguments = ArgumentList(call.arguments, encode)
        self.device_index = device_index
        self._lane = call.lane
        self._cluster, self._overlap = call.cluster, call.overlap
        self._config = _launch_config(call)
        addresses = (
            self._config.getPtr(), int(self.kernel.handle), ctypes.addressof(self.arguments.addresses), None
        )  # fmt: skip
        self._launch = partial(driver_function("cuLaunchKernelEx"), *map(ctypes.c_void_p, addresses))
        self._stream = 0
        self.kernel.allow_shared(call.shared_bytes, device_index, self.what)

    def point(self, buffers: Mapping[str, int]) -> None:
        self.arguments.point(buffers)

    def __call__(self) -> None:
        if self._lane:
            stream = side_stream(self.device_index, self._lane).cuda_stream
        else:
            stream = self._current_stream(self.device_index)
        if not stream and self._current_device() != self.device_index:
            with torch.cuda.device(
                self.device_index
            ):  # stream 0 means the default stream of the current context
                self.enqueue(stream)
        else:
            self.enqueue(stream)

    def node(self) -> Any:
        """Return the node of this launch in the CUDA graph being captured. Call it right after the launch."""
        from cuda.bindings import driver

        what = f"{self.what}: finding its node in the graph being captured"
        _, _, _, latest, *_ = check(driver.cuStreamGetCaptureInfo(self._stream), what)
        (node,) = latest
        return node

    def add_to_graph(self, graph: Any, behind: Any) -> Any:
        """Add this launch, with its current arguments, to a CUDA graph, after the node `behind` if there is one."""
        from cuda.bindings import driver

        what = f"{self.what}: adding it to a graph"
        parameters = driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.kern = self.kernel.handle
        parameters.kernelParams = ctypes.addressof(self.arguments.addresses)
        for name in _LAUNCHED:
            setattr(parameters, name, getattr(self._config, name))
        node = check(driver.cuGraphAddKernelNode(graph, None, 0, parameters), what)
        if self._cluster != (1, 1, 1):
            value = driver.CUkernelNodeAttrValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self._cluster
            attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            check(driver.cuGraphKernelNodeSetAttribute(node, attribute, value), what)
        if behind is not None:
            edge = driver.CUgraphEdgeData()
            if self._overlap:  # programmatic dependent launch: the kernel itself waits for its predecessor
                edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
                edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            check(driver.cuGraphAddDependencies(graph, [behind], [node], [edge], 1), what)
        return node

    @property
    def is_on_main_lane(self) -> bool:
        """True if it runs on the current stream, not on a side lane."""
        return self._lane == 0

    def enqueue(self, stream: int) -> None:
        """Launch on a stream of its device, whose context must be current."""
        if stream != self._stream:
            self._stream = stream
            self._config.hStream = stream
        if status := self._launch():
            retry(self._launch, status, self.device_index, self.what)


def capture_id(stream: torch.cuda.Stream) -> int | None:
    """Return the unique id of the CUDA graph being captured on the current stream; None if there is none."""
    if not torch.cuda.is_current_stream_capturing():
        return None
    from cuda.bindings import driver

    _, number, *_ = check(
        driver.cuStreamGetCaptureInfo(stream.cuda_stream), "finding the graph being captured"
    )
    return int(number)


_local = threading.local()


def side_stream(device_index: int, lane: int) -> torch.cuda.Stream:
    """Return a lane's stream, one per thread: a thread must not launch into another thread's capture."""
    known: dict[tuple[int, int], torch.cuda.Stream] = _local.__dict__.setdefault("streams", {})
    if (device_index, lane) not in known:
        known[device_index, lane] = dedicated_stream(device_index)
    return known[device_index, lane]


@contextmanager
def side_lanes(device_index: int, lanes: tuple[int, ...]) -> Iterator[None]:
    """Fork the lanes from the current stream and join them to it by events, which capture turns into graph edges."""
    current = torch.cuda.current_stream(device_index)
    for lane in lanes:
        side_stream(device_index, lane).wait_stream(current)
    try:
        yield
    finally:
        for lane in lanes:
            current.wait_stream(side_stream(device_index, lane))


def _launch_config(call: KernelCall) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = call.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = call.block
    config.sharedMemBytes = call.shared_bytes
    attributes = []
    if call.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = call.cluster
        attributes.append(attribute)
    if call.overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class CudaConstantCopy:
    """Copy into a `__constant__` array, on the stream of the launches that read it."""

    def __init__(
        self, copy: ConstantCopy, device_index: int, label: str, kernel: CudaKernel | None = None
    ) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._what = f"filling {copy.symbol} of {copy.program}{label}"
        self._device_index = device_index
        self._copy = copy
        self._source = 0
        kernel = kernel or load(copy.program, device_index)
        self._target, capacity = kernel.constant(copy.symbol, device_index, self._what)
        if capacity < copy.bytes:
            raise LaunchError(f"{self._what}: {copy.bytes} bytes do not fit into {capacity}")

    def point(self, buffers: Mapping[str, int]) -> None:
        self._source = buffers[self._copy.source.name] + self._copy.source.offset

    def __call__(self) -> None:
        stream = FAST_PATHS.current_stream(self._device_index)
        status = self._driver.cuMemcpyDtoDAsync(self._target, self._source, self._copy.bytes, stream)
        check(status, self._what)


def synchronize_after_each_launch() -> bool:
    """Return True for `ESCALADE_SYNC=1`: a kernel's error is then raised by its own launch, with its name."""
    return os.environ.get("ESCALADE_SYNC", "0") == "1"
