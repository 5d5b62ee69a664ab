"""Plans of networks and training steps for an H200: rung, config, problem, memory and geometry of every step."""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.device.recipe import KernelCall, Recipe
from escalade.engine.nodes import operator_of
from escalade.engine.plan.plan import Plan, PlanStep
from escalade.engine.training.step import plan_training_step
from escalade.errors import EscaladeError
from escalade.models.registry import MODELS, model
from escalade.ops import Config, Operation, Rung
from escalade.ops.base.card import H200
from escalade_bench.zoo import layers, varied
from tests.golden.store import Line

BATCHES = (1, 32, 256)
_ZOO: dict[str, Any] = {"varied": varied, "layers": layers}
_STORAGE = {"fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
}
_TRAINED = {
    "torchvision": (
        "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "densenet121", "convnext_tiny", "regnet_y_400mf",
        "shufflenet_v2_x1_0", "vgg11_bn",
    ),
    "models": tuple(MODELS),
}  # fmt: skip
_FAMILIES = frozenset((
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11", "vit_b_16",
    "fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "ssd300_vgg16.backbone",
    "fasterrcnn_mobilenet_v3_large_fpn.backbone",
))  # fmt: skip
"""One of torchvision's networks per kind of architecture."""
_TRAINED_OTHERWISE = ("resnet18/tf32/sgd", "resnet18/fp16/adamw", "autoencoder/tf32/adam", "lenet/fp32/sgd")
_TRAINING_BATCH = 64
_IMAGE_DIMENSIONS, _SIDE = 4, 224
_SIDES = {"inception_v3": 299, "ssd300_vgg16.backbone": 300, "ssdlite320_mobilenet_v3_large.backbone": 320}
_LIBRARIES: list[torch.library.Library] = []
"""Kept alive: operators are removed with the library that defines them."""


def tasks() -> list[str]:
    """Return plans that cover every family, as `family/network/dtype` and `training/family/network/dtype/optimizer`."""
    return own_tasks() + [task for task in _of_all_torchvision() if task.split("/")[1] in _FAMILIES]


def own_tasks() -> list[str]:
    """Return those that can be listed without torchvision."""
    found = [f"models/{name}/{dtype}" for name in MODELS for dtype in ("fp16", "fp32", "tf32")]
    for family, names in _TRAINED.items():
        found += [f"training/{family}/{name}/fp16/sgd" for name in names]
    found += [f"training/models/{rest}" for rest in _TRAINED_OTHERWISE]
    return found + [f"{family}/{name}/fp16" for family, module in _ZOO.items() for name in module.__all__]


def further_tasks() -> list[str]:
    """Return torchvision's other networks: mostly larger variants, which take minutes to capture."""
    return [task for task in _of_all_torchvision() if task.split("/")[1] not in _FAMILIES]


def _of_all_torchvision() -> list[str]:
    return [f"torchvision/{name}/fp16" for name in _torchvision_names()]


def collect(task: str, known: Sequence[str] = ()) -> list[Line]:
    """Return one line per step of a task's plans, and one per plan."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [line for key, plan in _plans(task) for line in plan_lines(key, task, plan)]
    except EscaladeError as error:  # a network that cannot be planned must stay so
        return [{"key": task, "task": task, "refused": type(error).__name__}]


def choices(task: str) -> list[tuple[Operation[Any], Rung[Any], Any, Config]]:
    """Return the operation, rung, problem and config of every kernel in the plans of a task, without duplicates."""
    torch.manual_seed(0)
    found: dict[tuple[Any, ...], None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _, plan in _plans(task):
                for step in plan.steps:
                    if step.lowered is not None and step.choice is not None:
                        one = step.choice
                        found[(step.lowered.operation, one.rung, one.problem, one.config)] = None
        except EscaladeError:  # a network that cannot be planned launches nothing
            return []
    return list(found)


def _plans(task: str) -> Iterator[tuple[str, Plan]]:
    return _training(task) if task.startswith("training/") else _inference(task)


def _inference(task: str) -> Iterator[tuple[str, Plan]]:
    family, name, dtype = task.split("/")
    network, item = _network(family, name)
    engine = escalade.compile(network, _input(2, item, torch.float32), dtype=dtype)
    for batch in BATCHES if dtype == "fp16" else (32,):
        yield f"{task}/b{batch}", engine.plan_for(H200, _input(batch, item, _STORAGE[dtype]))


def _training(task: str) -> Iterator[tuple[str, Plan]]:
    _, family, name, dtype, optimizer = task.split("/")
    network, item = _network(family, name)
    result = network.eval()(_input(2, item, torch.float32).zero_())
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = _input(_TRAINING_BATCH, item, torch.float32).zero_()
    classifies = family == "torchvision" or name.startswith(("resnet", "lenet"))
    shape = (_TRAINING_BATCH,) if classifies else (_TRAINING_BATCH, *result.shape[1:])
    target = torch.zeros(shape, dtype=torch.int64 if classifies else torch.float32)
    loss = F.cross_entropy if classifies else F.mse_loss
    made = _OPTIMIZERS[optimizer](network.parameters())
    yield task, plan_training_step(network, loss, made, (x, target), dtype, H200)


def _network(family: str, name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if family == "models":
        network, x = model(name)
        return network, tuple(x.shape[1:])
    if family == "torchvision":
        side = _SIDES.get(name, _SIDE)
        return _of_torchvision(name).eval(), (3, side, side)
    constructor = getattr(_ZOO[family], name)
    return constructor().eval(), tuple(constructor.example_shape)


def _input(batch: int, item: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an input with undefined contents: no plan depends on them."""
    is_image = len(item) + 1 == _IMAGE_DIMENSIONS
    layout = torch.channels_last if is_image else torch.contiguous_format
    return torch.empty(batch, *item, dtype=dtype, memory_format=layout)


def _torchvision() -> Any:
    """Import torchvision's networks; declare its own operators where its compiled half does not load."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if _LIBRARIES or "torchvision::nms" not in str(error):
            raise
        _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise SystemExit(
            "torchvision is not installed, and plans of its networks are part of the set: "
            "pip install --no-deps --target DIR 'torchvision==0.28.*', and add DIR to PYTHONPATH"
        ) from error


def _torchvision_names() -> list[str]:
    models = _torchvision()
    names = [*models.list_models(module=models), *models.list_models(module=models.segmentation)]
    return names + [f"{name}.backbone" for name in models.list_models(module=models.detection)]


def _of_torchvision(name: str) -> nn.Module:
    models = _torchvision()
    base, _, part = name.partition(".")
    options: dict[str, Any] = {}
    if base not in models.list_models(module=models):
        options["weights_backbone"] = None
    if base in models.list_models(module=models.segmentation) and not base.startswith("lraspp"):
        options["aux_loss"] = True
    made: nn.Module = models.get_model(base, weights=None, **options)
    return getattr(made, part) if part else made


def plan_lines(key: str, task: str, plan: Plan) -> Iterator[Line]:
    """Yield the lines of a plan: one for all of it, then one for each step in order."""
    steps = {step.node.name for step in plan.steps}
    workspaces = {
        step.workspace_name(one) for step in plan.steps if step.recipe for one in step.recipe.workspaces
    }
    yield {
        "key": key,
        "task": task,
        "arena_bytes": plan.arena_bytes,
        "outside_bytes": plan.outside_bytes,
        "outside": dict(plan.outside),
        "apart": dict(plan.pytorch_owned),
        "constants": [f"{one.name}: {one.form}" for one in plan.constants],
        "lasting": {name: one.bytes for name, one in plan.persistent.items()},
        "offsets": {name: at for name, at in plan.offsets.items() if name not in steps | workspaces},
        "outputs": list(plan.graph.outputs),
    }
    before = ""
    for step in plan.steps:
        yield {"key": f"{key}/{step.node.name}", "task": task, "after": before, **_step(plan, step)}
        before = step.node.name


def _step(plan: Plan, step: PlanStep) -> Line:
    found: Line = {
        "does": operator_of(step.node).title(step.node),
        "offset": plan.offsets.get(step.node.name),
        "by": "PyTorch" if step.in_pytorch else "an alias" if step.is_alias else "a kernel",
        "beside": step.side_output and f"{step.side_output.node}.{step.side_output.buffer}",
    }
    if step.lowered is not None and step.choice is not None:
        problem = step.choice.problem
        found |= {
            "problem": f"{step.lowered.operation.name} {problem.name} {problem.dtype} {problem.layout}",
            "rung": step.choice.rung.name,
            "config": {name: str(value) for name, value in step.choice.config.as_dict().items()},
        }
    if step.recipe is not None:
        names = {one.name: step.workspace_name(one) for one in step.recipe.workspaces}
        found |= _launches(step.recipe)
        found["workspaces"] = {name: plan.offsets.get(full) for name, full in names.items()}
    return found


def _launches(recipe: Recipe) -> Line:
    """Return geometry as text, and digests of values: of arguments in order, and of programs' constants.

    Neither contains names, so renaming a buffer or a constant changes nothing here.
    """
    calls = [step for step in recipe.steps if isinstance(step, KernelCall)]
    constants = sorted(str(value) for step in recipe.steps for _, value in step.program.constants)
    return {
        "launches": [
            f"{one.grid} x {one.block} cluster {one.cluster} shared {one.shared_bytes} lane {one.lane}"
            f"{' overlap' if one.overlap else ''}{' weights' if one.weights_only else ''}"
            for one in calls
        ],
        "arguments": _digest([list(_numbers(one.arguments)) for one in calls]),
        "compiled_with": _digest(constants),
    }


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a value, depth first."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _numbers(getattr(value, each.name))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
