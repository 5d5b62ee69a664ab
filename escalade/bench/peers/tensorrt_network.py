"""Networks in TensorRT: an engine built of the exported model, with its search for kernels, as one CUDA graph."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from escalade.bench.peers.network import NetworkPeer, Task, Unavailable
from escalade.bench.peers.onnx_model import INPUT, exported, require, results_of
from escalade.bench.peers.torch_network import graphed, require_cuda

SYSTEM = "tensorrt"
OPTIMISATION = 5
"""The most that the builder searches."""


def engines(task: Task) -> list[NetworkPeer]:
    """One engine: TensorRT finds the layouts itself; inputs come in NCHW, as ONNX has them."""
    require(SYSTEM)
    require_cuda(SYSTEM, task.device)
    package = importlib.import_module(SYSTEM)
    return [graphed(SYSTEM, task, "nchw", partial(_Engine, package, task))]


class _Engine:
    """A function of one tensor, on PyTorch's current stream."""

    def __init__(self, package: Any, task: Task, model: nn.Module) -> None:
        x = task.input("nchw")
        self._results: Sequence[torch.Tensor] = results_of(model, x)
        self._engine = _built(package, exported(model, x), task.dtype == "tf32")
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        outputs = [name for name in names if name != INPUT]
        for name, y in zip(outputs, self._results, strict=True):
            self._context.set_tensor_address(name, y.data_ptr())

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        self._context.set_tensor_address(INPUT, x.data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream(x.device).cuda_stream):
            raise Unavailable(f"{SYSTEM} could not run its engine")
        return self._results


def _built(package: Any, model: bytes, tf32: bool) -> Any:
    """The engine; every value has the type that it has in the model."""
    logger = package.Logger(package.Logger.ERROR)
    builder = package.Builder(logger)
    network = builder.create_network(1 << int(package.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = package.OnnxParser(network, logger)
    if not parser.parse(model):
        raise Unavailable(f"{SYSTEM} cannot read the model: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.builder_optimization_level = OPTIMISATION
    (config.set_flag if tf32 else config.clear_flag)(package.BuilderFlag.TF32)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise Unavailable(f"{SYSTEM} could build no engine of the model")
    return package.Runtime(logger).deserialize_cuda_engine(plan)
