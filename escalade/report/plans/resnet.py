"""ResNet-18 from a CPU to a GPU: what such a plan measures at its end."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.networks.evaluation import SUFFIX as EVALUATION
from escalade.measure.records import Record
from escalade.report import evaluation_pages
from escalade.report.commits import newest
from escalade.report.markdown import origin
from escalade.report.plans.section import Section

NETWORK = "resnet18"
_EVALUATION = """Top-1 and top-5 on labelled photographs, with weights that are no part of this project. In every dtype
the answers should be those of PyTorch in fp32."""


def _evaluation(records: Sequence[Record]) -> str:
    own = newest([r for r in records if r.workload == NETWORK + EVALUATION])
    if not own:
        return ""
    weights = sorted({r.config["weights"] for r in own})
    return (
        f"{origin(own)}\nWeights: {', '.join(f'`{name}`' for name in weights)}. {evaluation_pages.LEGEND}\n"
        f"{evaluation_pages.markdown_table(own)}"
    )


SECTIONS = (
    Section(
        "ResNet-18: right answers with real weights",
        _EVALUATION,
        "escalade evaluate resnet18 --weights WEIGHTS --data FOLDER --classes FILE --results results",
        _evaluation,
    ),
)
