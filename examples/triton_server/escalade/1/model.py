"""A saved engine as a model of Triton Inference Server's Python backend.

    cp resnet18.escalade examples/triton_server/escalade/1/model.escalade
    tritonserver --model-repository examples/triton_server

The engine takes images as bytes: `escalade build --mean --std`, or `engine.save` behind
`escalade.compile(..., normalize=(mean, std))`. The server's Python has Escalade installed.

The server passes up to the number of requests that config.pbtxt allows, each with one or more images. They become one
engine call, padded to a power of two, so that there are few plans; all of them are made while the model is loaded.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

import escalade
from escalade_apps.classify.preparation import classes_of, side_of

IMAGES, LOGITS = "IMAGES", "LOGITS"
ENGINE = pathlib.Path(__file__).parent / "model.escalade"


def _images(request: Any) -> torch.Tensor:
    return torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, IMAGES).to_dlpack())


class TritonPythonModel:
    """The class that the server looks up by name."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add inputs and outputs to the settings in config.pbtxt."""
        engine = escalade.load(ENGINE, device="cpu")
        side = side_of(engine.graph.inputs[0].shape)
        config.add_input({"name": IMAGES, "data_type": "TYPE_UINT8", "dims": [3, side, side]})
        config.add_output({"name": LOGITS, "data_type": "TYPE_FP32", "dims": [classes_of(engine)]})
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine on the instance's device."""
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        self._engine = escalade.load(ENGINE, device=device)
        side = side_of(self._engine.graph.inputs[0].shape)
        size, most = 1, int(pb_utils.ModelConfig(args["model_config"]).as_dict()["max_batch_size"])
        while size < 2 * most:
            self._logits(torch.zeros(size, 3, side, side, dtype=torch.uint8))
            size *= 2

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response per request, in order: from one call for all, or from single calls if that fails."""
        try:
            given = [_images(request) for request in requests]
            parts = self._logits(torch.cat(given)).split([len(images) for images in given])
        except Exception as error:
            if len(requests) > 1:  # one of them may be invalid; the others still get results
                return [response for request in requests for response in self.execute([request])]
            said = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse(output_tensors=[], error=said)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(LOGITS, part)]) for part in parts]

    def finalize(self) -> None:
        """Free the engine's memory before the process ends."""
        del self._engine

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        count = len(images)
        filled = images.new_zeros(1 << (count - 1).bit_length(), *images.shape[1:])
        filled[:count] = images
        return self._engine(filled.to(self._engine.device))[:count].float().cpu()
