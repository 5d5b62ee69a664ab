"""The networks: sizes, parameters, and published weights where they are at hand."""

from __future__ import annotations

import gzip
import os
import pathlib
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from escalade import models
from escalade.errors import UnsupportedError

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


def test_resnet_weights_survive_a_file(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    model, x = models.resnet18(10).eval(), torch.randn(1, 3, 64, 64)
    save_file(model.state_dict(), str(tmp_path / "w.safetensors"))
    torch.save(model.state_dict(), tmp_path / "w.pth")
    with torch.no_grad():
        for name in ("w.safetensors", "w.pth"):
            torch.testing.assert_close(models.load_resnet(models.resnet18(10), tmp_path / name)(x), model(x))
    with pytest.raises(UnsupportedError, match="does not fit this network"):
        models.load_resnet(models.resnet34(10), tmp_path / "w.pth")
    with pytest.raises(UnsupportedError, match="have another shape"):
        models.load_resnet(models.resnet18(11), tmp_path / "w.pth")
    with pytest.raises(UnsupportedError, match="there is no file"):
        models.load_resnet(models.resnet18(10), tmp_path / "none.pth")
    with pytest.raises(UnsupportedError, match=r"\.safetensors, \.pth and \.pt"):
        (tmp_path / "w.bin").write_bytes(b"")
        models.load_resnet(models.resnet18(10), tmp_path / "w.bin")


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


def test_broken_files_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.bin"
    for content, message in (
        (b"", "ends at byte 0"),
        (struct.pack("<i", 5), "ends at byte 4"),
        (struct.pack("<i5f", 5, *range(5)), "5 numbers where the network has 6912"),
        (struct.pack("<i", -3), "a count of -3"),
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
    # The basis counts by its directions alone.
    with torch.no_grad():
        y = model(x)
        model.basis.mul_(3.0)
        torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


def test_the_spectral_autoencoder_says_what_it_takes() -> None:
    with pytest.raises(UnsupportedError, match=r"takes \[batch, 320\]"):
        models.SpectralAutoencoder()(torch.randn(4, 300))
    with pytest.raises(UnsupportedError, match="at least 1"):
        models.SpectralAutoencoder(latent=0)
