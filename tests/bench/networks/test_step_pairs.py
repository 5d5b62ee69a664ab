"""Pairs around a training step, as far as they run without a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade import models
from escalade_bench.measure.records import Record
from escalade_bench.networks import step_pairs, training_step
from escalade_bench.networks.measurement import Case
from escalade_bench.networks.training_step import exact, standard
from escalade_bench.peers.network import Task
from escalade_bench.peers.torch_training_step import Lesson
from escalade_bench.report.document import markdown
from escalade_bench.report.pages import training


def test_a_step_that_is_fed_from_the_host_is_judged_like_any_other() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8)
    lesson = Lesson(models.ConvAutoencoder(4).train(), F.mse_loss, x, x, "fp32", 1e-2, 1.0)
    case = Case("pairs", Task(lesson.model, x, "fp32"), standard(lesson, exact(lesson), 4.0), 0.0)
    pupil, step = training_step.made(lesson, "nhwc")
    other = replace(lesson, target=x + 0.01)
    calls = {
        "right": step_pairs._fed(lesson, pupil, step, "pageable, one stream"),
        "wrong": step_pairs._fed(other, pupil, step, "pageable, one stream"),
    }
    found = {r.rung: r for r in step_pairs._compared(case, calls, lambda text: None)}
    assert not found["right"].failure and found["right"].system == "escalade" and found["right"].wall_us
    assert "its error is" in found["wrong"].failure


def test_pairs_become_a_table() -> None:
    pageable = Record(
        "autoencoder_training_pairs", "32_b256", "fp16", "nhwc", 256, "escalade", "pageable, one stream",
        timing="calls", median_us=1500.0, gpu="NVIDIA H200", commit="abc", date="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    pinned = replace(pageable, rung="pinned, two streams", median_us=750.0)
    broken = replace(pageable, rung="one arena", median_us=None, failure="its error is 3")
    text = markdown(training.pairs([pageable, pinned, broken]))
    assert "| A batch from host memory, and a step | pinned, two streams | 750.0 | 2.00× |" in text
    assert "| A step launched kernel by kernel | one arena | its error is 3 |  |" in text
    assert "not been measured yet" in markdown(training.pairs([]))
