"""What normalisation in training is: by PyTorch in float64, and its own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.batch_norm import reference as normalisation
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.batch_statistics import reference as statistics
from escalade.ops.shared import activation

Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: BatchNormTrainingProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ in mean and deviation, running statistics where they are moved, y of order one."""
    inputs = statistics.random_inputs(problem.statistics, device, seed)
    others = normalisation.random_inputs(problem.normalisation, device, seed + 1)
    wanted = ("weight", "bias", "residual") if problem.residual else ("weight", "bias")
    return {**inputs, **{name: others[name] for name in wanted}}


def empty_output(problem: BatchNormTrainingProblem, device: torch.device) -> torch.Tensor:
    return normalisation.empty_output(problem.normalisation, device)


def _normalised(problem: BatchNormTrainingProblem, inputs: Tensors) -> torch.Tensor:
    y = F.batch_norm(
        inputs["x"], None, None, inputs["weight"], inputs["bias"], training=True, eps=problem.epsilon
    )
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None)


def exact(problem: BatchNormTrainingProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    return _normalised(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: BatchNormTrainingProblem, inputs: Tensors) -> torch.Tensor:
    """The normalised x by PyTorch, without running statistics; on a CPU of fp32 tensors."""
    on_gpu = inputs["x"].is_cuda
    given = inputs if on_gpu else {name: tensor.float() for name, tensor in inputs.items()}
    return _normalised(problem, given).to(STORAGE[problem.dtype])
