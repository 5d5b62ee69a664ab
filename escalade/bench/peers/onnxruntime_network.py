"""Networks in ONNX Runtime: its CUDA provider over PyTorch's tensors, in either layout, as one CUDA graph.

On the CPU it is its CPU provider, called as it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from escalade.bench.peers.network import NetworkPeer, Task, Unavailable, waiting
from escalade.bench.peers.onnx_model import INPUT, exported, require, results_of
from escalade.bench.peers.torch_network import folded, graphed

SYSTEM = "onnxruntime"
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_BFLOAT16 = 16
"""ONNX's number for the type, which NumPy has not."""
_ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: _BFLOAT16}


def sessions(task: Task) -> list[NetworkPeer]:
    """A session for each layout that convolutions may have inside; inputs come in NCHW, as ONNX has them."""
    require(SYSTEM)
    package = importlib.import_module(SYSTEM)
    wanted = CUDA if task.device.type == "cuda" else CPU
    offered = package.get_available_providers()
    if wanted not in offered:
        raise Unavailable(
            f"the {SYSTEM} that is installed has no {wanted}, but {', '.join(offered)}; onnxruntime-gpu has it"
        )
    if wanted == CPU:
        return [_called(task, package)]
    return [
        replace(graphed(SYSTEM, task, "nchw", partial(_Session, package, task, layout)), layout=layout)
        for layout in ("nchw", "nhwc")
    ]


def _called(task: Task, package: Any) -> NetworkPeer:
    model, note = folded(task, "nchw")
    run, x = _Session(package, task, "nchw", model), task.input("nchw")
    return NetworkPeer(
        SYSTEM, "nchw", lambda: run(x), lambda results: results, waiting(task.device), note=note
    )


class _Session:
    """A function of one tensor. It works on the stream on which it is first called, and so on one alone."""

    def __init__(self, package: Any, task: Task, layout: str, model: nn.Module) -> None:
        self._package = package
        self._device = task.device
        self._layout = layout
        self._tf32 = task.dtype == "tf32"
        self._model: nn.Module | None = model
        self._session: Any = None
        self._results: Sequence[torch.Tensor] = ()
        self._options = package.RunOptions()
        # Otherwise every run waits for the GPU, which a recording of it cannot do.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._model is not None:
            self._results = results_of(self._model, x)
            self._session = self._made(exported(self._model, x))
            self._model = None
        binding = self._session.io_binding()
        binding.bind_input(*self._bound(INPUT, x))
        for output, y in zip(self._session.get_outputs(), self._results, strict=True):
            binding.bind_output(*self._bound(output.name, y))
        self._session.run_with_iobinding(binding, self._options)
        return self._results

    def _bound(self, name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        where = tensor.device
        element = _ELEMENTS[tensor.dtype]
        return name, where.type, where.index or 0, element, tuple(tensor.shape), tensor.data_ptr()

    def _made(self, model: bytes) -> Any:
        provider: Any = CPU
        if self._device.type == "cuda":
            provider = (
                CUDA,
                {
                    "device_id": str(self._device.index or 0),
                    "user_compute_stream": str(torch.cuda.current_stream(self._device).cuda_stream),
                    "cudnn_conv_algo_search": "EXHAUSTIVE",
                    "cudnn_conv_use_max_workspace": "1",
                    "prefer_nhwc": str(int(self._layout == "nhwc")),
                    "use_tf32": str(int(self._tf32)),
                },
            )
        session = self._package.InferenceSession(model, providers=[provider])
        wanted = provider if isinstance(provider, str) else provider[0]
        if session.get_providers()[0] != wanted:
            raise Unavailable(
                f"{SYSTEM} could not load its {wanted}: it has {session.get_providers()[0]} instead"
            )
        return session
