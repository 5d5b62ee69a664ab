"""A first look at networks: ResNet-18 compiled, and images classified by it and by PyTorch side by side.

`python -m escalade.commands.demo [FOLDER]` writes its images and weights there (.cache/demo). The weights are random,
since none come with Escalade: what the classes are means nothing, that both agree on them does.
"""

from __future__ import annotations

import pathlib
import sys
import time

import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from escalade import compile, models
from escalade.bench.networks.resnets import images
from escalade.commands.classify import Options, classify
from escalade.errors import EscaladeError

IMAGES = 8


def main(folder: pathlib.Path, console: Console) -> int:
    console.rule("A network")
    model, example = models.model("resnet18")
    began = time.perf_counter()
    engine = compile(model, example, dtype="fp16", device="cuda" if torch.cuda.is_available() else "cpu")
    console.print(f"ResNet-18 compiled for {engine.device} in {time.perf_counter() - began:.1f} s")
    console.print(engine.explain())
    x = images(IMAGES)
    with torch.no_grad():
        expected = model(x)
    same = int((engine(x.to(engine.device)).cpu().argmax(1) == expected.argmax(1)).sum())
    console.print(f"The same class as PyTorch's fp32 on {same} of {IMAGES} images.")
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(x):
        pixels = (picture * 64 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"blotches{number}.png")
    weights = folder / "resnet18.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights)
    console.print(f"\nescalade classify {folder} --weights {weights}")
    return max(int(same < IMAGES), classify(Options((folder,), weights), console))


if __name__ == "__main__":
    chosen = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/demo")
    try:
        sys.exit(main(chosen, Console()))
    except EscaladeError as error:
        sys.exit(f"escalade: {error}")
