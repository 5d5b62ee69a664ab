"""The networks: sizes, parameters, and published weights if available."""

from __future__ import annotations

import gzip
import os
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from escalade import models
from escalade.errors import UnsupportedError
from escalade.models.resnet import BasicBlock
from escalade.models.weight_files import FlatFile

ROOT = pathlib.Path(__file__).parent.parent.parent
DATA = pathlib.Path(os.environ.get("ESCALADE_DATA", ROOT.parent / "shared" / "data"))
FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def data(name: str) -> pathlib.Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not in {DATA}; set ESCALADE_DATA to the folder that has it")
    return path


@pytest.mark.parametrize(
    ("make", "parameters"),
    [(models.resnet18, 11_689_512), (models.resnet34, 21_797_672), (models.resnet50, 25_557_032)],
)
def test_resnets_have_their_published_sizes(make: object, parameters: int) -> None:
    model = make(1000)  # type: ignore[operator]
    assert sum(p.numel() for p in model.parameters()) == parameters
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (models.vgg16_bn, 138_365_992),
        (models.mobilenet_v2, 3_504_872),
        (models.densenet121, 7_978_856),
        (models.UNet, 31_037_698),
    ],
)
def test_other_networks_have_their_published_sizes(make: object, parameters: int) -> None:
    with torch.device("meta"):
        model = make()  # type: ignore[operator]
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            models.VGG(((4,), (8, 8)), 5, 3, 8, 2),
            {"features.0.weight", "features.8.running_var", "classifier.6.bias"},
        ),
        (
            models.MobileNetV2(((1, 8, 1, 1), (6, 8, 1, 1)), 5, 3, 1.0, 8, 16),
            {
                "features.0.1.bias",
                "features.1.conv.0.0.weight",
                "features.2.conv.2.weight",
                "classifier.1.weight",
            },
        ),
        (
            models.DenseNet((1, 2), 4, 8, 2, 5),
            {
                "features.conv0.weight",
                "features.denseblock2.denselayer2.norm1.weight",
                "features.transition1.conv.weight",
                "features.norm5.bias",
            },
        ),
        (models.UNet(3, 5, 4, 2), set()),
        (models.UNet(3, 5, 4, 2, upsample=True), set()),
    ],
)
def test_small_networks_run_and_have_torchvisions_names(model: torch.nn.Module, names: set[str]) -> None:
    assert names <= set(model.state_dict())
    with torch.no_grad():
        y = model.eval()(torch.randn(2, 3, 32, 32))
    assert y.shape[:2] == (2, 5) and y.shape[2:] in ((), (32, 32))


@pytest.mark.parametrize("name", ["mobilenet_v2", "lenet", "spectral_autoencoder"])
def test_named_networks_are_the_same_every_time(name: str) -> None:
    state = torch.get_rng_state()
    (one, x), (two, y) = models.model(name), models.model(name)
    assert torch.equal(torch.get_rng_state(), state)  # global random state is unchanged
    assert torch.equal(x, y) and x.shape[0] == 1 and not one.training
    for first, second in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(first, second)
    with torch.no_grad():
        result = one(x)
    assert bool(result.isfinite().all()) and 1e-2 < float(result.std()) < 1e2


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ((torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)), (9, 9)),
        ((torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4)), (9,)),
    ],
)
def test_batch_norms_use_the_statistics_of_their_input(layers: Any, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    model, x = torch.nn.Sequential(*layers), torch.randn(8, 3, *sizes)
    models.settle(model, x)
    conv, norm = layers
    inside = conv(x).detach()
    everywhere = (0, *range(2, inside.dim()))
    torch.testing.assert_close(norm.running_mean, inside.mean(everywhere))
    torch.testing.assert_close(norm.running_var, inside.var(everywhere))
    assert not norm.training and norm.momentum == 0.1 and float(norm.weight.detach().std()) > 0


def test_unknown_networks_are_named() -> None:
    with pytest.raises(UnsupportedError, match="model 'alexnet': supported are resnet18, "):
        models.model("alexnet")
    with pytest.raises(UnsupportedError, match="each must be at least 1"):
        models.UNet(depth=0)


def test_resnet_weights_survive_a_file(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model, x = models.resnet18(10).eval(), torch.randn(1, 3, 64, 64)
    save_file(model.state_dict(), str(tmp_path / "w.safetensors"))
    torch.save(model.state_dict(), tmp_path / "w.pth")
    with torch.no_grad():
        for name in ("w.safetensors", "w.pth"):
            torch.testing.assert_close(models.load_resnet(models.resnet18(10), tmp_path / name)(x), model(x))
    with pytest.raises(UnsupportedError, match="does not fit the network"):
        models.load_resnet(models.resnet34(10), tmp_path / "w.pth")
    with pytest.raises(UnsupportedError, match="has other shapes for fc.weight"):
        models.load_resnet(models.resnet18(11), tmp_path / "w.pth")
    with pytest.raises(UnsupportedError, match="no such file"):
        models.load_resnet(models.resnet18(10), tmp_path / "none.pth")
    with pytest.raises(UnsupportedError, match=r"\.safetensors, \.pth, \.pt and \.bin files"):
        (tmp_path / "w.npz").write_bytes(b"")
        models.load_resnet(models.resnet18(10), tmp_path / "w.npz")


def photograph(path: pathlib.Path) -> torch.Tensor:
    from PIL import Image

    image = Image.open(path).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    normalised = (pixels - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
    return torch.from_numpy(normalised).permute(2, 0, 1)


def test_resnet18_knows_photographs() -> None:
    model = models.load_resnet(models.resnet18(), data("resnet18_imagenet_rebuilt_fp16.safetensors"))
    classes = [line.split()[0] for line in data("imagenet_synsets.txt").read_text().splitlines()]
    files = sorted(data("images").glob("*.JPEG"))
    with torch.no_grad():
        answers = model(torch.stack([photograph(file) for file in files])).argmax(1)
    right = sum(
        classes[answer] == file.name.split("_")[0] for answer, file in zip(answers, files, strict=True)
    )
    assert right >= 0.7 * len(files), f"{right} of {len(files)}"


def test_the_autoencoder_reconstructs_images() -> None:
    model = models.load_autoencoder(data("autoencoder_naive.bin"))
    assert sum(p.numel() for p in model.parameters()) == 751_875
    images = np.load(data("cifar10_test1000.npz"))["x"]
    x = torch.from_numpy(images[:200]).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        assert model.encode(x[:1]).shape == (1, 128, 8, 8)
        error = float((model(x) - x).square().mean())
    assert error == pytest.approx(0.00524, rel=0.1)  # published for 1,000 images; these are its first 200


def test_lenet_reads_its_file() -> None:
    model = models.load_lenet(data("lenet_weights-86.bin"))
    with torch.no_grad():
        y = model(torch.rand(3, 1, 86, 86) * 255)
    assert y.shape == (3, 10) and bool(y.isfinite().all())
    assert float(model.conv1.weight.detach().abs().max()) > 0


def test_lenet_knows_clothes() -> None:
    from PIL import Image

    if not FASHION_MNIST.is_dir():
        pytest.skip(
            f"Fashion-MNIST is not in {FASHION_MNIST}; Debian's package dataset-fashion-mnist puts it there"
        )
    count = 100
    with gzip.open(FASHION_MNIST / "t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + count * 784), np.uint8, offset=16).reshape(count, 28, 28)
    with gzip.open(FASHION_MNIST / "t10k-labels-idx1-ubyte.gz") as file:
        labels = torch.from_numpy(np.frombuffer(file.read(8 + count), np.uint8, offset=8).astype(np.int64))
    resized = [Image.fromarray(image).resize((86, 86), Image.Resampling.BILINEAR) for image in images]
    x = torch.from_numpy(np.stack([np.asarray(image) for image in resized])).float()[:, None]
    with torch.no_grad():
        answers = models.load_lenet(data("lenet_weights-86.bin"))(x).argmax(1)
    assert int((answers == labels).sum()) == 86


def test_flat_files_fill_parameters_in_order(tmp_path: pathlib.Path) -> None:
    path, values = tmp_path / "w.bin", np.arange(5, dtype=np.float32)
    path.write_bytes(struct.pack("<i", 5) + values.tobytes())
    parameters, file = (torch.zeros(3), torch.zeros(2, 1)), FlatFile(path)
    file.fill(parameters, file.count())
    file.end()
    assert torch.cat([one.flatten() for one in parameters]).tolist() == values.tolist()


def test_broken_files_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.bin"
    for content, message in (
        (b"", "truncated at byte 0"),
        (struct.pack("<i", 5), "truncated at byte 4"),
        (struct.pack("<i5f", 5, *range(5)), "5 values where the network has 6912"),
        (struct.pack("<i", -3), "negative count -3"),
    ):
        path.write_bytes(content)
        with pytest.raises(UnsupportedError, match=message):
            models.load_autoencoder(path)
    path.write_bytes(struct.pack("<ii", 1, 0))
    with pytest.raises(UnsupportedError, match="has 0 layers with parameters"):
        models.load_lenet(path)
    with pytest.raises(UnsupportedError, match="cannot be read"):
        models.load_lenet(tmp_path / "none.bin")


@pytest.mark.parametrize(("bands", "frames", "latent"), [(64, 5, 32), (40, 1, 8), (128, 10, 128)])
def test_the_spectral_autoencoder_keeps_shapes_and_trains(bands: int, frames: int, latent: int) -> None:
    torch.manual_seed(3)
    model, x = models.SpectralAutoencoder(bands, frames, latent), torch.randn(16, bands * frames)
    assert model(x).shape == x.shape
    scores = model.anomaly_score(x)
    assert scores.shape == (16,)
    torch.testing.assert_close(scores.mean(), torch.nn.functional.mse_loss(model(x), x))
    before = float(scores.mean().detach())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.anomaly_score(x).mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < before
    # The basis counts by its directions only.
    with torch.no_grad():
        y = model(x)
        model.basis.mul_(3.0)
        torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


def test_the_spectral_autoencoder_refuses_unsupported_arguments() -> None:
    with pytest.raises(UnsupportedError, match=r"takes \[batch, 320\]"):
        models.SpectralAutoencoder()(torch.randn(4, 300))
    with pytest.raises(UnsupportedError, match="at least 1"):
        models.SpectralAutoencoder(latent=0)


def cifar_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("downsample", "shortcut").replace("fc.", "linear."): value
        for name, value in state.items()
    }


@pytest.mark.parametrize("small_images", [False, True])
@pytest.mark.parametrize("make", [models.resnet18, models.resnet34, models.resnet50])
def test_resnets_are_known_by_their_weights(make: object, small_images: bool, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = make(7, small_images).eval()  # type: ignore[operator]
    state = cifar_names(model.state_dict()) if small_images else model.state_dict()
    save_file(state, str(tmp_path / "w.safetensors"))
    found = models.read_resnet(tmp_path / "w.safetensors")
    assert (found.layers, found.small_images, found.fc.out_features) == (model.layers, small_images, 7)
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(found(x), model(x))


def test_a_resnet_of_another_width_is_known_by_its_weights(tmp_path: pathlib.Path) -> None:
    model = models.ResNet(BasicBlock, (2, 2, 2, 2), 3, True, width=6).eval()
    torch.save(model.state_dict(), tmp_path / "best.pt")
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(models.read_resnet(tmp_path / "best.pt")(x), model(x))
    for stem in (torch.zeros(3), torch.zeros(200_000, 3, 3, 3)):  # the second would take terabytes
        torch.save(model.state_dict() | {"conv1.weight": stem}, tmp_path / "best.pt")
        with pytest.raises(UnsupportedError, match=r"best\.pt (does not contain a ResNet|does not fit)"):
            models.read_resnet(tmp_path / "best.pt")


def test_the_stem_for_small_images_keeps_their_size() -> None:
    model = models.resnet18(10, small_images=True)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # published for CIFAR-10's ResNet-18
    with torch.no_grad():
        assert model.eval().layer1(model.maxpool(model.conv1(torch.randn(1, 3, 32, 32)))).shape == (
            1,
            64,
            32,
            32,
        )


def test_weights_come_out_of_checkpoints_and_wrappers(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model = models.resnet18(3, small_images=True).eval()
    wrapped = {f"module.{name}": value for name, value in cifar_names(model.state_dict()).items()}
    x = torch.randn(1, 3, 32, 32)
    for container in ("state_dict", "model", "net"):
        torch.save({container: wrapped, "epoch": 3, "acc": 94.2}, tmp_path / "w.pt")
        with torch.no_grad():
            assert torch.equal(models.read_resnet(tmp_path / "w.pt")(x), model(x))


def test_files_without_a_resnet_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.pth"
    for content, sentence in (
        ({"weight": torch.zeros(3)}, "does not contain a ResNet with torchvision's names"),
        ([torch.zeros(3)], "does not contain named tensors"),
        ({"epoch": 3}, "does not contain named tensors"),
    ):
        torch.save(content, path)
        with pytest.raises(UnsupportedError, match=sentence):
            models.read_resnet(path)
    wide = {
        name: value for name, value in models.resnet18(3).state_dict().items() if "layer3.1.conv2" not in name
    }
    torch.save(wide, path)
    with pytest.raises(UnsupportedError, match="it lacks layer3.1.conv2.weight"):
        models.read_resnet(path)
    for name in ("broken.pth", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(UnsupportedError, match=f"{name} cannot be read as weights"):
            models.read_resnet(tmp_path / name)
