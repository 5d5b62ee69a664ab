"""Mutants of classification, of Ray jobs, of their commands and of the networks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_JOBS, _RESULTS = "escalade_apps/ray/jobs.py", ("tests/ray/test_results.py",)
_RAY, _STORAGE = "escalade_apps/ray/prediction.py", ("tests/ray/test_storage.py", "tests/ray/test_results.py")
_PREPARATION, _CLASSIFY = "escalade_apps/classify/preparation.py", ("tests/classify/test_classify.py",)
_PREDICTION = "escalade_apps/classify/prediction.py"
_IMAGES, _IMAGE_TESTS = "escalade_apps/classify/images.py", ("tests/classify/test_images.py",)
_LABELED, _LABEL_TESTS = "escalade_apps/classify/labels.py", ("tests/classify/test_labeled.py",)
_FORMULAS, _MODELS = ("tests/models/test_architectures.py",), ("tests/models/test_models.py",)
_RESNET = "escalade/models/resnet.py"
_TRAIN_COMMAND = ("tests/commands/test_train.py",)

MUTANTS: tuple[Mutant, ...] = (
    # Ray jobs
    Mutant(
        "apps/manifest-without-dtype",
        _JOBS,
        '"sha256": network.sha256, "dtype": network.dtype,',
        '"sha256": network.sha256,',
        _RESULTS,
    ),
    Mutant("apps/manifest-without-list", _JOBS, '"list": _hash(map(os.fsencode, found)), ', "", _RESULTS),
    Mutant("apps/manifest-without-shard", _JOBS, ' "shard": shard, "top": top,', ' "top": top,', _RESULTS),
    Mutant("apps/manifest-without-format", _JOBS, '"format": self._form, ', "", _RESULTS),
    Mutant(
        "apps/manifest-without-crop",
        _JOBS,
        ', "crop": [network.crop.resize, network.crop.side],',
        ",",
        _RESULTS,
    ),
    Mutant(
        "apps/list-in-any-order",
        _JOBS,
        "_hash(map(os.fsencode, found))",
        "_hash(sorted(map(os.fsencode, found)))",
        _RESULTS,
    ),
    Mutant(
        "apps/batch-and-top-swapped",
        _JOBS,
        "_PredictorFactory(predictor, network, device, batch, top)",
        "_PredictorFactory(predictor, network, device, top, batch)",
        _RESULTS,
    ),
    Mutant("apps/truncated-shards-are-done", _JOBS, "if end == ending}", "}", _RESULTS),
    Mutant(
        "apps/unreadable-images-not-counted",
        _JOBS,
        'return len(table) - int(table["unreadable"].null_count)',
        'return int(table["unreadable"].null_count)',
        _RESULTS,
    ),
    Mutant(
        "apps/given-up-late",
        "escalade_apps/ray/attempts.py",
        "self.crashed.count(part) >= MAX_CRASHES",
        "self.crashed.count(part) > MAX_CRASHES",
        _RESULTS,
    ),
    Mutant(
        "apps/ranks-from-zero",
        _RAY,
        "enumerate(prediction.guesses, start=1)",
        "enumerate(prediction.guesses)",
        _RESULTS,
    ),
    Mutant(
        "apps/rows-without-shard", _RAY, '"shard": shards.get(prediction.file),', '"shard": None,', _RESULTS
    ),
    Mutant(
        "apps/images-found-twice",
        "escalade_apps/ray/storage.py",
        "return list(dict.fromkeys(found)), unreadable",
        "return found, unreadable",
        _STORAGE,
    ),
    Mutant(
        "apps/contents-ignored",
        _RAY,
        'contents = rows["bytes"] if "bytes" in rows else',
        'contents = rows["bytes"] if "contents" in rows else',
        _STORAGE,
    ),
    # Classification
    Mutant(
        "apps/deviations-in-reverse",
        _PREPARATION,
        "(0.229, 0.224, 0.225)",
        "(0.225, 0.224, 0.229)",
        _CLASSIFY,
    ),
    Mutant(
        "apps/mean-and-deviation-swapped",
        _PREPARATION,
        "return mean or default_mean, std or default_std",
        "return std or default_mean, mean or default_std",
        _CLASSIFY,
    ),
    Mutant(
        "apps/given-deviations-in-reverse",
        _PREPARATION,
        "return mean or default_mean, std or default_std",
        "return mean or default_mean, (std or default_std)[::-1]",
        _CLASSIFY,
    ),
    Mutant(
        "apps/engine-deviations-in-reverse",
        "escalade/engine/compiler.py",
        "(1 / (255 * std)).float()",
        "(1 / (255 * std.flip(0))).float()",
        _CLASSIFY,
    ),
    Mutant(
        "apps/small-images-normalized",
        _PREPARATION,
        "_normalization(side <= _SMALL, mean, std)",
        "_normalization(side < _SMALL, mean, std)",
        _CLASSIFY,
    ),
    Mutant(
        "apps/crop-of-the-whole",
        _PREPARATION,
        "Crop(side * _IMAGENET_CROP.resize // _IMAGENET_CROP.side, side)",
        "Crop(side, side)",
        _CLASSIFY,
    ),
    Mutant(
        "apps/least-likely-first",
        _PREDICTION,
        ".softmax(1).topk(top)",
        ".softmax(1).topk(top, largest=False)",
        _CLASSIFY,
    ),
    Mutant("apps/softmax-over-the-batch", _PREDICTION, ".softmax(1)", ".softmax(0)", _CLASSIFY),
    Mutant(
        "apps/labels-by-rank",
        _PREDICTION,
        "names = [labels[number] for number in classes]",
        "names = list(labels[: len(classes)])",
        _CLASSIFY,
    ),
    Mutant(
        "apps/resize-rounds",
        _IMAGES,
        "int(self.resize * width / shorter), int(self.resize * height / shorter)",
        "round(self.resize * width / shorter), round(self.resize * height / shorter)",
        _IMAGE_TESTS,
    ),
    Mutant(
        "apps/box-rounds-size",
        _IMAGES,
        "resized = (self.resize * sizes / sizes.min(1, keepdims=True)).astype(int)",
        "resized = np.rint(self.resize * sizes / sizes.min(1, keepdims=True))",
        _IMAGE_TESTS,
    ),
    Mutant(
        "apps/corner-rounds-down",
        _IMAGES,
        "corner = np.rint((resized - self.side) / 2)",
        "corner = np.floor((resized - self.side) / 2)",
        _IMAGE_TESTS,
    ),
    Mutant(
        "apps/crop-corner-swapped",
        _IMAGES,
        "left, top = crop.corner(*image.size)",
        "top, left = crop.corner(*image.size)",
        _IMAGE_TESTS,
    ),
    Mutant(
        "apps/not-turned-upright",
        _IMAGES,
        "        ImageOps.exif_transpose(opened, in_place=True)\n",
        "",
        _IMAGE_TESTS,
    ),
    Mutant(
        "apps/classes-unsorted",
        _LABELED,
        "distinct = sorted(set(labels))",
        "distinct = sorted(set(labels), reverse=True)",
        _LABEL_TESTS,
    ),
    Mutant(
        "apps/first-images-only",
        _LABELED,
        "images[position * len(images) // limit]",
        "images[position]",
        _LABEL_TESTS,
    ),
    Mutant(
        "apps/options-swapped",
        "escalade/commands/classify.py",
        "request = ClassifierRequest(weights, network, labels, dtype, mean, std)",
        "request = ClassifierRequest(weights, network, labels, dtype, std, mean)",
        _CLASSIFY,
    ),
    Mutant(
        "apps/cluster-shard-is-batch",
        "escalade/commands/classify.py",
        "top=top, shard=shard, form=form",
        "top=top, shard=batch or 1, form=form",
        _CLASSIFY,
    ),
    Mutant(
        "apps/option-of-train-lost",
        "escalade/commands/train.py",
        '"patience": patience, "every": every,',
        '"patience": patience,',
        _TRAIN_COMMAND,
    ),
    Mutant(
        "apps/flip-off-is-not-given",
        "escalade/commands/train.py",
        "for name, value in options.items() if value is not None}",
        "for name, value in options.items() if value}",
        _TRAIN_COMMAND,
    ),
    # Networks
    Mutant(
        "apps/relu-before-the-sum",
        _RESNET,
        "return torch.relu(self.bn2(self.conv2(y)) + shortcut)",
        "return torch.relu(self.bn2(self.conv2(y))) + shortcut",
        _FORMULAS,
    ),
    Mutant(
        "apps/stride-in-the-first",
        _RESNET,
        "_conv_bn(channels, width, 1)\n        self.conv2, self.bn2 = _conv_bn(width, width, 3, stride)",
        "_conv_bn(channels, width, 1, stride)\n        self.conv2, self.bn2 = _conv_bn(width, width, 3)",
        _FORMULAS,
    ),
    Mutant(
        "apps/width-is-usual",
        _RESNET,
        "stem.shape[2:] == (3, 3), len(stem))",
        "stem.shape[2:] == (3, 3))",
        _MODELS,
    ),
    Mutant(
        "apps/no-way-around",
        "escalade/models/mobilenet.py",
        "self.has_residual = stride == 1 and channels == filters",
        "self.has_residual = False",
        _FORMULAS,
    ),
    Mutant(
        "apps/new-channels-first",
        "escalade/models/densenet.py",
        "torch.cat([x, new], 1)",
        "torch.cat([new, x], 1)",
        _FORMULAS,
    ),
    Mutant(
        "apps/skip-connection-second",
        "escalade/models/unet.py",
        "torch.cat([skip, self.up(x)], 1)",
        "torch.cat([self.up(x), skip], 1)",
        _FORMULAS,
    ),
    Mutant(
        "apps/basis-not-normalized",
        "escalade/models/autoencoders.py",
        "basis = F.normalize(self.basis, dim=1)\n        latent",
        "basis = F.normalize(self.basis, dim=0)\n        latent",
        _FORMULAS,
    ),
    Mutant(
        "apps/flat-file-rewinds",
        "escalade/models/weight_files.py",
        "values[expected : expected + parameter.numel()]",
        "values[: parameter.numel()]",
        (f"{_MODELS[0]}::test_flat_files_fill_parameters_in_order",),
    ),
    Mutant(
        "apps/adobe-colors-are-usual",
        "escalade_apps/classify/jpeg.py",
        'body[11:12] != b"\\x01"',
        'body[11:12] == b"\\x00"',
        ("tests/classify/test_decoders.py::test_colors_other_than_ycbcr_are_left_to_pillow",),
    ),
    Mutant(
        "apps/pieces-beyond-a-shard",
        "escalade_apps/ray/attempts.py",
        "yield from self._split((start, min(start + step, last)))",
        "yield from self._split((start, start + step))",
        ("tests/ray/test_results.py::test_a_batch_that_ended_a_process_is_retried_in_smaller_parts",),
    ),
)
