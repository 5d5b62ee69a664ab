"""Use a fake card in every test of this folder."""

from __future__ import annotations

from tests.bench.fake_cuda import card as card
