"""Mutants of the trainer: runs, steps, batches, data and several processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TRAINER, _RUNS = "escalade_apps/train/trainer.py", "tests/train/test_trainer.py"
_KILLED = (f"{_RUNS}::test_a_run_resumes_bit_for_bit_wherever_it_was_killed",)
_PLANNED = (f"{_RUNS}::test_planned_steps_go_on_bit_for_bit_too",)
_EVALUATION = (f"{_RUNS}::test_an_evaluation_is_of_all_test_images_in_evaluation_mode",)
_LOOP = (f"{_RUNS}::test_steps_are_those_of_a_plain_loop_at_the_given_rates",)
_RATES = (f"{_RUNS}::test_learning_rates_climb_and_come_down",)
_STEPS, _SETTINGS = "escalade_apps/train/steps.py", "escalade_apps/train/settings.py"
_BATCHES, _AUGMENTATION = "escalade_apps/train/batches.py", "escalade_apps/train/augmentation.py"
_BATCH_TESTS, _DATA_TESTS = ("tests/train/test_batches.py",), ("tests/train/test_data.py",)
_PARALLEL, _TWO = "escalade_apps/train/parallel.py", ("tests/train/test_parallel.py",)

MUTANTS: tuple[Mutant, ...] = (
    # Resumed runs
    Mutant(
        "trainer/moments-not-restored",
        _STEPS,
        'self._optimizer.load_state_dict(state["optimizer"])\n        self._step',
        "self._step",
        _PLANNED,
    ),
    Mutant(
        "trainer/loss-scale-not-restored",
        _STEPS,
        '        self._step.load_state_dict(state["scale"])\n',
        "",
        _PLANNED,
    ),
    Mutant(
        "trainer/moments-not-restored-shared",
        _STEPS,
        'self._optimizer.load_state_dict(state["optimizer"])\n        if current',
        "if current",
        _KILLED,
    ),
    Mutant(
        "trainer/generators-not-restored",
        _TRAINER,
        '        checkpoints.restore_randomness(state["randomness"], self._processes.device)\n',
        "",
        _KILLED,
    ),
    Mutant(
        "trainer/generators-not-set",
        "escalade_apps/train/checkpoints.py",
        'torch.set_rng_state(states["cpu"])',
        "pass",
        _KILLED,
    ),
    Mutant(
        "trainer/model-not-restored",
        _TRAINER,
        '        self.model.load_state_dict(state["model"])\n',
        "",
        _KILLED,
    ),
    Mutant(
        "trainer/best-not-restored",
        _TRAINER,
        'state["step"], state["best"], state["since_best"]',
        'state["step"], math.inf, state["since_best"]',
        (f"{_RUNS}::test_it_ends_early_where_nothing_gets_better",),
    ),
    Mutant(
        "trainer/patience-not-restored",
        _TRAINER,
        'state["step"], state["best"], state["since_best"]',
        'state["step"], state["best"], 0',
        (f"{_RUNS}::test_it_ends_early_where_nothing_gets_better",),
    ),
    Mutant(
        "trainer/resumed-at-the-epoch",
        _TRAINER,
        "self._batches.epoch(epoch, first)",
        "self._batches.epoch(epoch)",
        _KILLED,
    ),
    Mutant(
        "trainer/log-repeats-a-step",
        "escalade_apps/train/logs.py",
        'line["step"] <= since',
        'line["step"] <= since + 1',
        _KILLED,
    ),
    Mutant(
        "trainer/checkpoint-between-epochs-only",
        _TRAINER,
        "if ends_epoch or (self.settings.every and self.step % self.settings.every == 0):",
        "if ends_epoch:",
        (f"{_RUNS}::test_a_run_resumes_bit_for_bit_wherever_it_was_killed",),
    ),
    Mutant(
        "trainer/batch-may-change",
        _SETTINGS,
        'EXTENDABLE = ("epochs", "steps"',
        'EXTENDABLE = ("epochs", "batch", "steps"',
        (f"{_RUNS}::test_another_run_is_not_taken_for_the_same",),
    ),
    Mutant(
        "trainer/rate-of-the-next-step",
        _TRAINER,
        "self.settings.rate(self.step, self.total)",
        "self.settings.rate(self.step + 1, self.total)",
        (f"{_RUNS}::test_a_run_learns_and_writes_its_files",),
    ),
    Mutant(
        "trainer/ends-a-step-late",
        _TRAINER,
        "self.total - self.step)",
        "self.total - self.step + 1)",
        (f"{_RUNS}::test_a_resnet_is_trained_by_the_same_machinery",),
    ),
    # Evaluations
    Mutant("trainer/evaluated-in-training-mode", _TRAINER, "        self.model.eval()\n", "", _EVALUATION),
    Mutant("trainer/trained-in-evaluation-mode", _TRAINER, "        self.model.train()\n", "", _EVALUATION),
    Mutant(
        "trainer/last-batch-weighs-too-much",
        _TRAINER,
        ".double() * len(images)",
        ".double() * self.settings.batch",
        _EVALUATION,
    ),
    Mutant(
        "trainer/accuracy-of-the-worst",
        _TRAINER,
        "(output.argmax(1) == target)",
        "(output.argmin(1) == target)",
        _EVALUATION,
    ),
    Mutant(
        "trainer/equal-is-better",
        _TRAINER,
        "better = loss < self._best",
        "better = loss <= self._best",
        (f"{_RUNS}::test_it_ends_early_where_nothing_gets_better",),
    ),
    # Schedules and optimizers
    Mutant(
        "trainer/warm-up-from-zero",
        _SETTINGS,
        "self.lr * (step + 1) / warmup",
        "self.lr * step / warmup",
        _RATES,
    ),
    Mutant(
        "trainer/cosine-from-the-start",
        _SETTINGS,
        "(step - warmup) / max(1, total - warmup)",
        "step / max(1, total - warmup)",
        _RATES,
    ),
    Mutant(
        "trainer/steps-beyond-the-epochs",
        _SETTINGS,
        "return min(self.epochs * epoch_steps,",
        "return max(self.epochs * epoch_steps,",
        _RATES,
    ),
    Mutant(
        "trainer/sgd-without-weight-decay",
        _STEPS,
        "momentum=0.9, weight_decay=weight_decay)",
        "momentum=0.9)",
        (f"{_RUNS}::test_optimizers_have_the_settings_of_the_run",),
    ),
    Mutant(
        "trainer/adamw-is-adam",
        _STEPS,
        'if name == "adamw" else',
        'if name == "AdamW" else',
        (f"{_RUNS}::test_optimizers_have_the_settings_of_the_run",),
    ),
    Mutant(
        "trainer/gradients-kept",
        _STEPS,
        "        self._optimizer.zero_grad(set_to_none=True)\n",
        "",
        _LOOP,
    ),
    Mutant("trainer/rate-not-set", _STEPS, '        group["lr"] = rate', "        pass", _LOOP),
    # Batches
    Mutant(
        "trainer/augmentation-repeats",
        _AUGMENTATION,
        'generator(seed, "moves", epoch)',
        'generator(seed, "moves")',
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/augmentation-ignores-seed",
        _AUGMENTATION,
        'generator(seed, "moves", epoch)',
        'generator(0, "moves", epoch)',
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/order-repeats",
        _BATCHES,
        'generator(seed, "order", epoch)',
        'generator(seed, "order")',
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/never-shifted-furthest",
        _AUGMENTATION,
        "torch.randint(-self.shift, self.shift + 1,",
        "torch.randint(-self.shift, self.shift or 1,",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/never-flipped", _AUGMENTATION, "2 if self.flip else 1", "1 if self.flip else 2", _BATCH_TESTS
    ),
    Mutant(
        "trainer/rows-and-columns-swapped",
        _AUGMENTATION,
        "moves.shifts[:, :1]",
        "moves.shifts[:, 1:]",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/mirror-off-by-one",
        _AUGMENTATION,
        "size - 1 - (size - 1 - positions.abs()).abs()",
        "size - 1 - (size - positions.abs()).abs()",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/partial-batch-kept",
        _BATCHES,
        "self.steps = len(images) // batch",
        "self.steps = -(-len(images) // batch)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/partial-batch-dropped-in-order",
        _BATCHES,
        "range(rank, len(images), batch * processes)",
        "range(rank, len(images) - batch * processes + 1, batch * processes)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/shares-overlap",
        _BATCHES,
        "self._first = rank * self._share",
        "self._first = rank",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/evaluation-shares-overlap",
        _BATCHES,
        "min(start + batch * processes, len(images)), processes)",
        "min(start + batch, len(images)))",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/streamed-batches-share-memory",
        _BATCHES,
        "Images(self.pixels.to(device, copy=True)",
        "Images(self.pixels.to(device)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/streamed-labels-share-memory",
        _BATCHES,
        "self.labels.to(device, copy=True)",
        "self.labels.to(device)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/moves-of-other-images",
        _BATCHES,
        "yield _augmented(images, moves and moves.select(indices)",
        "yield _augmented(images, moves and moves.select(indices.flip(0))",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/scale-in-reverse",
        _BATCHES,
        "self._scale = 1 / (torch.tensor(std) * 255)",
        "self._scale = 1 / (torch.tensor(std).flip(0) * 255)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/training-deviations-in-reverse",
        "escalade_apps/train/tasks.py",
        "(0.229, 0.224, 0.225)",
        "(0.225, 0.224, 0.229)",
        _BATCH_TESTS,
    ),
    Mutant(
        "trainer/held-out-images-trained-on",
        "escalade_apps/train/data/images.py",
        "train, test = shuffled[tests:].sort().values",
        "train, test = shuffled.sort().values",
        _DATA_TESTS,
    ),
    Mutant(
        "trainer/checksum-without-labels",
        "escalade_apps/train/data/images.py",
        "for part in (self.pixels, self.labels):",
        "for part in (self.pixels,):",
        _DATA_TESTS,
    ),
    Mutant(
        "trainer/classes-of-the-test-part",
        "escalade_apps/train/data/reading.py",
        "_classes_of(train or path)",
        "_classes_of(test or path)",
        _DATA_TESTS,
    ),
    # Several processes
    Mutant("trainer/gradients-summed", _PARALLEL, "        gradients /= self.count\n", "", _TWO),
    Mutant(
        "trainer/loss-of-one-process",
        _PARALLEL,
        "return self.total(value) / self.count",
        "return value",
        _TWO,
    ),
    Mutant(
        "trainer/divergence-is-logged",
        "escalade_apps/train/logs.py",
        "if not math.isfinite(loss):",
        "if math.isnan(loss):",
        ("tests/train/test_trainer.py::test_a_loss_that_is_no_number_ends_it",),
    ),
    Mutant(
        "trainer/idx-labels-of-another-count",
        "escalade_apps/train/data/arrays.py",
        "if len(pixels) != len(classes):",
        "if len(pixels) < len(classes):",
        ("tests/train/test_data.py::test_idx_files_are_read_packed_or_not",),
    ),
)
