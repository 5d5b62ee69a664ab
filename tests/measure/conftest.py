"""The card that is made up, for every test here."""

from __future__ import annotations

from tests.bench.fake_cuda import card as card
