"""A card that held its clock down is seen in what is reported of it."""

from __future__ import annotations

from dataclasses import replace

from escalade.device.nvml import Conditions
from escalade.measure.records import Record
from escalade.report import cells, gaps, terminal

COOL = Conditions(1980.0, 3201.0, 400.0, 45.0, "")
HOT = Conditions(1750.0, 3201.0, 699.0, 61.0, "the power limit")
RECORD = Record("conv2d", "p", "fp16", "nhwc", 8, "escalade", "window", median_us=20.0, date="2026-01-03")


def test_throttling_is_said_beside_times_and_below_tables() -> None:
    cool, hot = (replace(RECORD, conditions=each.as_dict()) for each in (COOL, HOT))
    assert [cells.microseconds(one) for one in (RECORD, cool, hot)] == ["20.00", "20.00", "20.00ᵗ"]
    assert terminal.conditions_line([RECORD.conditions]) == ""
    assert terminal.conditions_line([cool.conditions]) == "The card meanwhile: 1980 MHz, 400 W, 45 °C"
    assert terminal.conditions_line([cool.conditions, hot.conditions]) == (
        "The card meanwhile: 1750 to 1980 MHz, 400 to 699 W, 45 to 61 °C; "
        "1 of 2 times (ᵗ) with the clock held down by the power limit"
    )
    assert "held down in 1 of 2 measurements: 1 by the power limit." in gaps.block([RECORD, cool, hot])
    assert "Clocks" not in gaps.block([RECORD, cool])
