"""The schema of a row of metrics: one row per training step.

metrics.jsonl, the trackers, summaries, charts and comparisons derive their names, units and labels
from the fields of `StepMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

# Steps left out of every steady-state figure: they warm caches, queues and the solver up.
WARMUP_STEPS = 2
# Of `phase_s`, what is left beside a task's direction ("forward", "backward", "reduce", "update")
# and what devices waited for ("wait for data", ...). Of `memory_bytes`, what holds the bytes.
IDLE = "idle"
DEVICE, DEVICE_PEAK, HOST = "device", "device_peak", "host"


@dataclass(frozen=True)
class SkippedUpdate:
    """Why a step changed no parameter ("not finite" or "spike"); the modules whose gradients are
    not finite, the first one in backward's order first; the batch's samples by name."""

    why: str
    modules: tuple[str, ...]
    samples: tuple[str, ...]


class Column(NamedTuple):
    """What a field of a row holds, and how trackers and reports show it.

    Attributes:
      doc: what it holds.
      unit: of its numbers: "s", "%" (of 1), "bytes", "FLOP", "FLOP/s", or "" for others.
      label: what tables of figures call its median over the steps, with "{}" for a key; "": such
        tables do not have it.
      chart: title of its chart over the steps; "": there is none.
      is_tracked: whether TensorBoard and W&B get it.
    """

    doc: str
    unit: str = ""
    label: str = ""
    chart: str = ""
    is_tracked: bool = False


Keyed = Mapping[str, float]  # numbers by name: of a submesh, a module, a process


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did; a row of metrics.jsonl has exactly these fields. Numbers that
    are not finite are null in the file. docs/watching.md explains every field to users."""

    step: Annotated[int, Column("number of the step, from 0")]
    loss: Annotated[
        float,
        Column("loss per supervised token of the global batch, over all modules", is_tracked=True),
    ]
    supervised_tokens: Annotated[int, Column("tokens of the batch with a weight above 0")]
    step_s: Annotated[
        float, Column("from the end of the previous step to its own", "s", is_tracked=True)
    ]
    learning_rate: Annotated[float, Column("of parts without a rate of their own")] = 0.0
    learning_rates: Annotated[Keyed, Column("of each part that trains", is_tracked=True)] = field(
        default_factory=dict
    )
    losses: Annotated[Keyed, Column("loss of each module, without its weight in the sum")] = field(
        default_factory=dict
    )
    grad_norm: Annotated[float, Column("global gradient norm before clipping", is_tracked=True)] = (
        0.0
    )
    skipped: Annotated[
        SkippedUpdate | None, Column("why the step changed no parameter; null: it did")
    ] = None
    tokens_per_s: Annotated[
        float, Column("tokens of samples in the last module", label="tokens / s", is_tracked=True)
    ] = 0.0
    model_flops: Annotated[
        float, Column("needed, without padding and recomputation", "FLOP", "model FLOP a step")
    ] = 0.0
    model_flops_by_module: Annotated[Keyed, Column("`model_flops` of a module", "FLOP")] = field(
        default_factory=dict
    )
    flops_per_s: Annotated[
        float, Column("`model_flops` over `step_s`", "FLOP/s", "model FLOP / s", is_tracked=True)
    ] = 0.0
    mfu: Annotated[
        float | None,
        Column("`flops_per_s` over the peak of all devices", "%", "MFU", is_tracked=True),
    ] = None
    mfu_by_module: Annotated[
        Keyed, Column("`mfu` over the devices that hold the module", "%", "MFU, {}", "MFU")
    ] = field(default_factory=dict)
    flops_per_s_by_module: Annotated[
        Keyed,
        Column("`flops_per_s` of a module", "FLOP/s", "model FLOP / s, {}", "model FLOP a second"),
    ] = field(default_factory=dict)
    padding_fraction: Annotated[
        Keyed,
        Column("padding in a module's tokens", "%", "padding, {}", "padding", is_tracked=True),
    ] = field(default_factory=dict)
    imbalance: Annotated[
        Keyed,
        Column(
            "tokens of the fullest data rank over the mean one, less 1, over all groups",
            "%",
            "imbalance, {}",
            "imbalance: fullest over mean data rank",
        ),
    ] = field(default_factory=dict)
    phase_s: Annotated[
        Keyed, Column("what the mean device did in the step", "s", "{}, of a step")
    ] = field(default_factory=dict)
    busy_fraction: Annotated[Keyed, Column("of the makespan, by submesh", "%", is_tracked=True)] = (
        field(default_factory=dict)
    )
    memory_bytes: Annotated[
        Keyed,
        Column(
            "of the process or device that holds most: in use (device), the most so far "
            "(device_peak), on the host",
            "bytes",
            "memory, {}",
            "memory in use",
        ),
    ] = field(default_factory=dict)
    groups: Annotated[
        Mapping[str, int], Column("groups of a module and shape, MODULE:ROWSxTOKENS")
    ] = field(default_factory=dict)
    compiles: Annotated[int, Column("programs compiled during the step")] = 0
    n_bad: Annotated[
        int, Column("samples of the batch that could not be decoded and were replaced")
    ] = 0
    schedule_wait_s: Annotated[float, Column("wait for the schedule", "s")] = 0.0
    save_wait_s: Annotated[float, Column("wait for a checkpoint", "s")] = 0.0
    schedule_s: Annotated[
        float, Column("solver time off the training path", "s", "schedule solved in")
    ] = 0.0
    schedule_work: Annotated[int, Column("units of work of the solver")] = 0
    made_by: Annotated[str, Column("what found the schedule")] = ""
    makespan_s: Annotated[float, Column("of the schedule", "s", "makespan, scheduled")] = 0.0
    lower_bound_s: Annotated[float, Column("that no schedule undercuts", "s")] = 0.0
    integer_bound_s: Annotated[
        float, Column("what an integer program proved of that; 0: it was not solved", "s")
    ] = 0.0
    schedule_gap: Annotated[
        float, Column("makespan over its bound, less 1", "%", "schedule over its proved bound")
    ] = math.nan
    moved_in_node: Annotated[
        Keyed, Column("features sent to another data rank of the node, by SOURCE > TARGET", "bytes")
    ] = field(default_factory=dict)
    moved_across_nodes: Annotated[Keyed, Column("features sent to other nodes", "bytes")] = field(
        default_factory=dict
    )
    correction: Annotated[
        Keyed,
        Column(
            "of the last sample of task times: sampling (1: now), farthest_factor, "
            "predicted_gain_s, overhead_s; empty where predictions are not corrected"
        ),
    ] = field(default_factory=dict)
    process_s: Annotated[
        Keyed, Column("computing without waiting, of the 32 slowest processes; empty of one", "s")
    ] = field(default_factory=dict)
    own: Annotated[
        Keyed, Column("of the user's callbacks", label="own metric {}, median", is_tracked=True)
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0 or not 0 <= self.step_s < math.inf:
            raise ValueError(f"a step needs step >= 0 and a finite step_s >= 0, got {self}")


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepMetrics, include_extras=True).items()
}
_HINTS = get_type_hints(StepMetrics)
# Fields that hold a number, and those that hold one by name (of a submesh, a module, a process).
SCALAR_FIELDS = tuple(n for n, kind in _HINTS.items() if kind in (int, float, float | None))
KEYED_FIELDS = tuple(n for n, k in _HINTS.items() if k in (Keyed, Mapping[str, int]))
TRACKED_FIELDS = tuple(name for name, column in COLUMNS.items() if column.is_tracked)
ColumnKey = str | tuple[str, str]  # a field, or a field and a key


def iter_numbers(row: Any, names: Iterable[str]) -> Iterator[tuple[ColumnKey, float]]:
    """Yield the numbers in some fields of a `StepMetrics` or a `MetricsRow`."""
    for name in names:
        value = getattr(row, name)
        if isinstance(value, int | float):
            yield name, value
        else:
            yield from (((name, key), v) for key, v in (value or {}).items() if v is not None)


# What reports read of a row, of other versions too: only step and step_s have to be there.
MetricsRow = msgspec.defstruct(
    "MetricsRow",
    [
        ("step", int),
        ("step_s", float),
        *((n, float | None, None) for n in SCALAR_FIELDS if n not in ("step", "step_s")),
        *((n, dict[str, float | None] | None, None) for n in KEYED_FIELDS),
        ("skipped", SkippedUpdate | None, None),
        ("made_by", str | None, None),
    ],
)


class Percentiles(NamedTuple):
    """The 10th, 50th and 90th percentile of a sample."""

    p10: float
    median: float
    p90: float


def percentiles(values: Iterable[float]) -> Percentiles:
    """That of the finite values; all nan when there is none."""
    finite = [v for v in values if math.isfinite(v)] or [math.nan]
    return Percentiles(*np.percentile(finite, [10, 50, 90]).tolist())
