"""Networks of many families: a small version of each matches its model, and few steps fall back to PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.ops.base.accuracy import relative_error
from escalade_bench.coverage.catalogue import entries
from escalade_bench.coverage.run import enliven
from escalade_bench.networks.plans import by_operator, planned
from escalade_bench.peers.torch_network import _folded
from escalade_bench.zoo import varied

MODULE = "escalade_bench.zoo.varied"
PUBLISHED = {
    "cyclegan": 11_378_179,
    "dcgan": 3_576_704,
    "dncnn": 556_096,
    "mlp_mixer": 18_528_264,
    "pix2pix": 54_413_955,
    "style_transfer": 1_679_235,
    "vit_small": 22_050_664,
    "zero_dce": 79_416,
}
"""Published parameter counts, for networks as large as in their papers or reference code."""
SMALL: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "cbam_resnet": ((8, 1, 5), (3, 32, 32)),
    "convmixer": ((8, 2, 4, 4, 5), (3, 32, 32)),
    "coordconv": (((8, 16), 5), (3, 16, 16)),
    "csp_detector": ((8, 1, 3, 4), (3, 64, 64)),
    "cyclegan": ((8, 1), (3, 16, 16)),
    "dcgan": ((8,), (12, 1, 1)),
    "deeplab": ((8, 5, (1, 2)), (3, 64, 64)),
    "diffusion_unet": ((8, (1, 2)), (4, 16, 16)),
    "dncnn": ((8, 4), (1, 16, 16)),
    "eca_resnet": ((8, 1, 5), (3, 32, 32)),
    "edsr": ((2, 8, 2), (3, 8, 8)),
    "espcn": ((3, 16), (1, 8, 12)),
    "frames_and_motion": ((8, 5), (3, 3, 16, 16)),
    "fsrcnn": ((3, 16, 8, 2), (1, 8, 12)),
    "ghostnet": ((((16, 16, 3, 1), (48, 24, 3, 2), (40, 24, 5, 1)), 5), (3, 16, 16)),
    "hourglass": ((16, 2, 4), (3, 32, 32)),
    "hrnet": ((8, 2, 4), (3, 64, 32)),
    "m5": ((8, 5), (1, 2400)),
    "mlp_mixer": ((8, 16, 2, 5), (3, 32, 32)),
    "mobilevit": ((8, 16, 2, 5), (3, 64, 64)),
    "nafnet": ((8, (1, 1), 1, (1, 1)), (3, 16, 16)),
    "pix2pix": ((8, 6), (3, 64, 64)),
    "pixelcnn": ((16, 2, 8), (1, 12, 12)),
    "rcan": ((4, 16, 2, 1), (3, 8, 8)),
    "resnet3d": ((8, 1, 5), (3, 8, 16, 16)),
    "retinanet": ((8, 1, 16, 3, 4), (3, 128, 128)),
    "se_resnet": ((8, 1, 5), (3, 32, 32)),
    "siamese": ((8, 16), (2, 1, 32, 32)),
    "sknet": ((16, 1, 5), (3, 32, 32)),
    "standardised_resnet": ((16, (1, 1), 4, 5), (3, 32, 32)),
    "style_transfer": ((8, 1), (3, 16, 16)),
    "tcn": (((8, 16), 3, 5), (4, 24)),
    "unet_512": ((3, 2, 8, 2), (3, 32, 32)),
    "vit_small": ((8, 16, 2, 2, 5), (3, 32, 32)),
    "wavenet": ((8, 16, 3, 1, 12), (1, 40)),
    "zero_dce": ((8, 2), (3, 16, 16)),
}
"""The sizes of each network made small, and of its items."""
IN_PYTORCH: dict[str, dict[str, int]] = {
    "cbam_resnet": {"convert": 8},
    "coordconv": {"convert": 2, "expand": 2},
    "csp_detector": {"permute": 3},
    "diffusion_unet": {"convert": 2, "matmul": 2, "permute": 2, "select": 3, "slice": 3},
    "frames_and_motion": {"permute": 1},
    "ghostnet": {"convert": 3},
    "m5": {"log_softmax": 1},
    "mlp_mixer": {"permute": 5},
    "mobilevit": {"permute": 30, "scaled_dot_product_attention": 9, "unbind": 27},
    "retinanet": {"concatenate": 2},
    "siamese": {"unbind": 2},
    "sknet": {"slice": 6},
    "vit_small": {
        "concatenate": 1,
        "expand": 1,
        "permute": 9,
        "scaled_dot_product_attention": 2,
        "select": 1,
        "unbind": 6,
    },
    "zero_dce": {"convert": 2},
}
"""Upper bound of the steps left to PyTorch in fp16 plans."""


def test_every_constructor_says_what_it_takes_and_is_as_large_as_published() -> None:
    found = {entry.name: entry for entry in entries(MODULE)}
    assert list(found) == varied.__all__ == list(SMALL)
    with torch.device("meta"):
        for name, parameters in PUBLISHED.items():
            assert sum(each.numel() for each in found[name].make().parameters()) == parameters, name
    assert all(len(entry.item or ()) == len(SMALL[name][1]) for name, entry in found.items())


@pytest.mark.share(7)
@pytest.mark.parametrize("name", SMALL)
def test_a_network_is_compiled_and_right_and_little_is_left_to_pytorch(name: str) -> None:
    sizes, item = SMALL[name]
    torch.manual_seed(0)
    model, x = varied.NETWORKS[name].sized(*sizes, item=item).eval(), torch.randn(3, *item)
    enliven(model, x)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(x))
    engine = Engine(capture(model, (x,)), "fp32", "cpu")
    for result, wanted in zip(pytree.tree_leaves(engine(x)), expected, strict=True):
        assert result.shape == wanted.shape
        assert relative_error(result, wanted) < 1e-4  # rounding errors grow with untrained weights
    with torch.device("meta"):
        plan = planned(Engine(engine.graph, "fp16", "cpu"), x.half())
    assert Counter(by_operator(plan)) <= Counter(IN_PYTORCH.get(name, {}))


@pytest.mark.parametrize("name", ["ghostnet", "retinanet", "se_resnet"])
def test_peers_fold_the_norms_of_networks_whose_layers_are_made_by_calls(name: str) -> None:
    sizes, item = SMALL[name]
    folded, note = _folded(varied.NETWORKS[name].sized(*sizes, item=item).eval())
    called = [str(node.target) for node in folded.graph.nodes if node.op == "call_module"]  # type: ignore[union-attr]
    assert not note and not any(isinstance(folded.get_submodule(one), nn.BatchNorm2d) for one in called)
