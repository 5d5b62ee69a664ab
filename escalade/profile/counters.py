"""The counters of one kernel: which metrics are asked for, and the figures that they come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from escalade.profile.readings import Reading

_STALL, _ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
STALLS = f"regex:^{_STALL}[a-z_]*{_ISSUE.replace('.', '[.]')}$"
"""All reasons for which a warp does not issue, whichever the architecture has."""
NO_STALL = ("selected", "not_selected")
"""States of a warp that could issue: it does, or another does in its place."""
METRICS = {
    "ns": ("gpu__time_duration.sum",),
    "dram_read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),
    "dram_written": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "dram_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "l2": ("lts__t_bytes.sum",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "static_shared": ("launch__shared_mem_per_block_static",),
    "dynamic_shared": ("launch__shared_mem_per_block_dynamic",),
    "load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
    "load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
    "store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",),
    "store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    "shared_turns": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
    "shared_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
}
"""What Nsight Compute calls each figure: names that one version or architecture has and another has not are
alternatives."""

_GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
_TURNS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
COUNTS = {
    **{
        f"global_{count}_{unit}": (_GLOBAL.format(unit, operation),)
        for count, operation in (("load", "ld"), ("store", "st"), ("copy", "ldgsts"))
        for unit in ("requests", "sectors")
    },
    "shared_load_requests": ("smsp__inst_executed_op_shared_ld.sum", "smsp__inst_executed_op_ldsm.sum"),
    "shared_store_requests": ("smsp__inst_executed_op_shared_st.sum",),
    **{
        f"shared_{count}_{unit}": (metric.format(operation),)
        for count, operation in (("load", "ld"), ("store", "st"))
        for unit, metric in (("turns", _TURNS), ("conflicts", _CONFLICTS))
    },
    "fma": ("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",),
}
"""The metrics that add up to what the twin counts, by the twin's names."""


@dataclass(frozen=True)
class Counters:
    """What one launch of a kernel did. None stands for what could not be counted."""

    kernel: str
    us: float | None = None
    dram_read_bytes: float | None = None
    dram_written_bytes: float | None = None
    dram_pct: float | None = None
    """The rate at which memory was moved, in percent of the most that it can."""
    l2_bytes: float | None = None
    l2_hit_pct: float | None = None
    tensor_pct: float | None = None
    """Cycles in which tensor cores were at work, in percent of all."""
    issue_pct: float | None = None
    """Cycles in which schedulers issued an instruction, in percent of all."""
    occupancy_pct: float | None = None
    """Warps that were there, in percent of those that a multiprocessor has room for."""
    registers: int | None = None
    shared_bytes: int | None = None
    """Shared memory of a block."""
    load_sectors: float | None = None
    """Sectors of 32 bytes that a warp's load from global memory touched."""
    store_sectors: float | None = None
    conflicts_pct: float | None = None
    """Turns of the banks of shared memory that would not have been needed without conflicts, in percent of all."""
    stalls: dict[str, float] = field(default_factory=dict)
    """Shares of the warps that waited, by reason, the largest first; together 1."""
    counts: dict[str, int] = field(default_factory=dict)
    """What the twin counts too, by its names (docs/twin.md)."""

    @property
    def dram_bytes(self) -> float | None:
        if self.dram_read_bytes is None:
            return None
        return self.dram_read_bytes + (self.dram_written_bytes or 0.0)


def counters_of(reading: Reading) -> Counters:
    """The figures that a reading comes to."""

    def value(name: str) -> float | None:
        return next((reading.values[one] for one in METRICS[name] if one in reading.values), None)

    def ratio(part: str, whole: str, scale: float = 1.0) -> float | None:
        above, below = value(part), value(whole)
        return scale * above / below if above is not None and below else None

    def whole(*names: str) -> int | None:
        found = [one for one in map(value, names) if one is not None]
        return round(sum(found)) if found else None

    nanoseconds = value("ns")
    return Counters(
        kernel=reading.kernel,
        us=None if nanoseconds is None else nanoseconds / 1e3,
        dram_read_bytes=value("dram_read"),
        dram_written_bytes=value("dram_written"),
        dram_pct=value("dram_pct"),
        l2_bytes=value("l2"),
        l2_hit_pct=value("l2_hit_pct"),
        tensor_pct=value("tensor_pct"),
        issue_pct=value("issue_pct"),
        occupancy_pct=value("occupancy_pct"),
        registers=whole("registers"),
        shared_bytes=whole("static_shared", "dynamic_shared"),
        load_sectors=ratio("load_sectors", "load_requests"),
        store_sectors=ratio("store_sectors", "store_requests"),
        conflicts_pct=ratio("shared_conflicts", "shared_turns", 100.0),
        stalls=_stalls(reading),
        counts={
            name: round(sum(reading.values[metric] for metric in metrics))
            for name, metrics in COUNTS.items()
            if all(metric in reading.values for metric in metrics)
        },
    )


def _stalls(reading: Reading) -> dict[str, float]:
    found = {
        name.removeprefix(_STALL).removesuffix(_ISSUE): value
        for name, value in reading.values.items()
        if name.startswith(_STALL) and name.endswith(_ISSUE) and "_not_issued" not in name
    }
    waiting = {reason: value for reason, value in found.items() if reason not in NO_STALL and value > 0}
    total = sum(waiting.values())
    return {reason: value / total for reason, value in sorted(waiting.items(), key=lambda pair: -pair[1])}
