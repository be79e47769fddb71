"""Memory of each submesh: its peak from groups in flight, its course over a trace, and the options
that reduce it: recomputation in backward (remat) and sharding over data ranks (ZeRO).

An option trades time for memory. Single candidates list the Pareto-optimal combinations that fit
(`best_combinations`); spaces only use the minimum of each quantity over the options that may fit
(`block_minimum`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.state import Array, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    SEND,
    Layout,
    ModelProfile,
    Plan,
    Remat,
    SegmentPlan,
    Shape,
    Trace,
    Zero,
)
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.simulate.task_graph import segment_links, segments_with_backward, submesh_resources

# (time in seconds, bytes from then on) by ascending time; the last point is the trace's end.
StepFunction = tuple[tuple[float, float], ...]
# A segment's (resource, state and residual bytes of all groups in flight, temporary bytes while one
# of its programs runs).
SegmentNeed = tuple[int, Array, Array]


def segment_need(resource: int, n_bytes: SegmentBytes, in_flight: Array) -> SegmentNeed:
    """Return the memory that a segment needs with `in_flight` groups."""
    return resource, n_bytes.state + n_bytes.residuals * in_flight, n_bytes.temporaries


def resource_peaks(needs: Iterable[SegmentNeed]) -> dict[int, Array]:
    """Return peak bytes per resource: the sum over segments plus one program's temporaries."""
    live: dict[int, Array] = {}
    work: dict[int, Array] = {}
    for resource, segment_bytes, temporaries in needs:
        live[resource] = live.get(resource, 0.0) + segment_bytes
        work[resource] = np.maximum(work.get(resource, 0.0), temporaries)
    return {r: live[r] + work[r] for r in live}


def peak_bytes(
    layout: Layout,
    costs: CostModel,
    in_flight: Mapping[str, int],
    trainable: Collection[str] | None = None,
) -> dict[str, float]:
    """Return peak bytes per device by submesh, with `in_flight[segment]` groups between forward and
    backward, each of the module's largest shape and under the segment's first recompute policy;
    temporaries cover both policies. `trainable`: segments with an optimizer; None: all.
    """
    resource_of = submesh_resources(layout)
    trained = {s.name for s in layout.segments} if trainable is None else set(trainable)
    backward = set(segments_with_backward(layout, trained))

    def largest_bytes(s: SegmentPlan) -> SegmentBytes:
        runs = {"trained": s.name in trained, "backward": s.name in backward}
        return costs.max_segment_bytes(s, layout, **runs)

    def need(s: SegmentPlan) -> SegmentNeed:
        n_bytes = largest_bytes(s)
        if s.remat_less is not None:
            work = np.maximum(n_bytes.temporaries, largest_bytes(s.with_less_remat).temporaries)
            n_bytes = replace(n_bytes, temporaries=work)
        return segment_need(resource_of[s.submesh], n_bytes, in_flight.get(s.name, 0))

    peaks = resource_peaks(map(need, layout.segments))
    return {name: float(peaks.get(r, 0.0)) for name, r in resource_of.items()}


def group_bytes(layout: Layout, costs: CostModel, s: SegmentPlan, shape: Shape) -> float:
    """Return a group's bytes per device in a segment from forward to backward, with its input."""
    mesh = layout.submesh(s.submesh).shape
    predictions = costs.predict(s.module, mesh.model, shape.rows, shape.tokens)
    runs = {"trained": True, "backward": True}
    return float(costs.segment(s, mesh).n_bytes(layout.group_size, predictions, **runs).residuals)


@dataclass(frozen=True)
class ByteTable:
    """Bytes per device of a layout, from which memory over time is computed."""

    # Parameters, gradients, optimizer state and the largest program's temporaries, by submesh.
    constant_bytes: Mapping[str, float]
    # A group's bytes from forward to backward by (segment, shape), under each recompute policy.
    group_bytes: Mapping[tuple[str, Shape], float]
    second_group_bytes: Mapping[tuple[str, Shape], float] = field(default_factory=dict)


def byte_table(layout: Layout, profile: ModelProfile) -> ByteTable:
    """Predict a layout's bytes from a profile; ValueError if it lacks a module or degree."""
    costs = CostModel(profile)
    first, second = (
        {
            (s.name, shape): group_bytes(layout, costs, segment, shape)
            for s, segment in segments
            for shape in layout.shapes(s.module)
        }
        for segments in (
            [(s, s) for s in layout.segments],
            [(s, s.with_less_remat) for s in layout.segments if s.remat_less is not None],
        )
    )
    return ByteTable(peak_bytes(layout, costs, {}), first, second)


def memory_over_time(
    layout: Layout,
    trace: Trace,
    shapes: Mapping[int, Shape],
    table: ByteTable,
    second_remat: Collection[tuple[str, int]] = (),
) -> dict[str, StepFunction]:
    """Return the bytes per device of each submesh over the time of a trace.

    A group's bytes count from its input's arrival to the end of its backward, or of its forward if
    the segment runs no backward. The input arrives when the module's previous segment, or the send
    from it, ends; in a module's first segment, when the group starts, since a trace does not name
    the groups that other modules send.

    Args:
      shapes: shape of each group of the trace; other groups count as 0 bytes.
      second_remat: (segment, group) pairs that run under the second recompute policy.
    """
    submesh_of = {s.name: s.submesh for s in layout.segments}
    previous = {x.target: x.source for x in segment_links(layout) if x.edge is None}
    arrived_s: dict[tuple[str, str, int], float] = {}  # by submesh or link, sender and group
    for e in trace.events:
        if e.direction in (FORWARD, SEND):
            arrived_s.setdefault((e.submesh, e.segment, e.group), e.end_s)
    changes: dict[str, dict[float, float]] = {m.name: {0.0: 0.0} for m in layout.submeshes}
    events = {(e.segment, e.group, e.direction): e for e in trace.events}
    for name, group in dict.fromkeys((e.segment, e.group) for e in trace.events):
        tasks = [events[k] for d in (FORWARD, BACKWARD) if (k := (name, group, d)) in events]
        is_second = (name, group) in second_remat
        by_shape = table.second_group_bytes if is_second else table.group_bytes
        n_bytes = by_shape.get((name, shapes[group]), 0.0) if group in shapes else 0.0
        if not tasks or not n_bytes:
            continue
        submesh, sender = submesh_of[name], previous.get(name, "")
        sender_mesh = submesh_of.get(sender, "")
        sent_s = arrived_s.get((sender_mesh, sender, group), tasks[0].start_s)
        first_s = arrived_s.get((f"{sender_mesh} → {submesh}", sender, group), sent_s)
        for time_s, more_bytes in ((first_s, n_bytes), (tasks[-1].end_s, -n_bytes)):
            changes[submesh][time_s] = changes[submesh].get(time_s, 0.0) + more_bytes
    curves: dict[str, StepFunction] = {}
    for name, change in changes.items():
        constant, times_s = table.constant_bytes.get(name, 0.0), sorted(change)
        live_bytes = accumulate(change[time_s] for time_s in times_s)
        points = [(t, constant + max(0.0, n)) for t, n in zip(times_s, live_bytes)]
        ends_early = times_s[-1] < trace.makespan_s
        curves[name] = (*points, *[(trace.makespan_s, points[-1][1])] * ends_early)
    return curves


def memory_of_trace(
    layout: Layout, profile: ModelProfile, trace: Trace, shapes_by_name: Mapping[int, str]
) -> dict[str, StepFunction]:
    """Return `memory_over_time` of a saved trace. Its groups are named "module:ROWSxTOKENS", plus
    " +SEGMENT" for each segment that runs the group under its second recompute policy. ValueError:
    the trace belongs to another plan."""
    known = {f"{m}:{shape.name}": shape for m in layout.modules for shape in layout.shapes(m)}
    groups = {e.group for e in trace.events if e.group >= 0}
    words = {g: shapes_by_name.get(g, "").split(" +") for g in groups}
    if any(name not in known for name, *_ in words.values()):
        raise ValueError("the trace has groups that do not name a shape of the plan")
    if {e.segment for e in trace.events} - {s.name for s in layout.segments}:
        raise ValueError("the trace belongs to another plan")
    shapes = {g: known[name] for g, (name, *_) in words.items()}
    second = {(segment, g) for g, (_, *segments) in words.items() for segment in segments}
    return memory_over_time(layout, trace, shapes, byte_table(layout, profile), second)


@dataclass(frozen=True)
class MemoryOption:
    """A module's recomputation and sharding; see `SegmentPlan`. The default is the fastest."""

    remat: Remat = "none"
    zero: Zero = 1
    shard_devices: int = 0
    unrolled: bool = False

    def apply(self, segment: SegmentPlan) -> SegmentPlan:
        """Return the segment with this option and no second recompute policy."""
        return replace(segment, **vars(self), remat_less=None)

    @staticmethod
    def from_segment(segment: SegmentPlan) -> MemoryOption:
        sharding = segment.zero, segment.shard_devices
        return MemoryOption(segment.remat, *sharding, segment.unrolled)

    @property
    def description(self) -> str:
        """Description of the differences from the default; "" if there are none."""
        words = [self.remat] * (self.remat != "none") + [f"ZeRO {self.zero}"] * (self.zero > 1)
        words += [f"within {self.shard_devices}"] * (self.shard_devices > 0)
        return " ".join(words)


def options_of(layout: Layout) -> dict[str, MemoryOption]:
    """Return each module's option, with `shard_devices` 0 if it has no effect."""
    options = {}
    for m in layout.modules:
        segment = layout.segments_of(m)[0]
        mesh = layout.submesh(segment.submesh)
        if segment.shard_ranks(mesh.data, mesh.model) == mesh.data:
            segment = replace(segment, shard_devices=0)
        options[m] = MemoryOption.from_segment(segment)
    return options


def with_options(plan: Plan, options: Mapping[str, MemoryOption]) -> Plan:
    """Return the plan with the given options of some modules."""
    own = MemoryOption.from_segment
    segments = (options.get(s.module, own(s)).apply(s) for s in plan.layout.segments)
    return plan.with_layout(segments=tuple(segments))


def describe_savings(layout: Layout) -> str:
    """Describe the modules' memory options in words; "none" if nothing is saved."""
    words = []
    for m, option in options_of(layout).items():
        text = option.description
        if second := next((s.remat_less for s in layout.segments_of(m) if s.remat_less), None):
            text = text.replace(option.remat, f"{option.remat} or {second}", 1)
        words += [f"{m} {text}"] * bool(text)
    return ", ".join(words) or "none"


@dataclass(frozen=True)
class ModuleOptions:
    """A module's options with memory (`needs`) and time by segment.

    Arrays of `needs` are [n_options, n_rows, n_granularities]; those of `seconds` are
    [4, n_options, ...], as in `ModuleTable`.
    """

    options: tuple[MemoryOption, ...]
    needs: tuple[SegmentNeed, ...]
    seconds: tuple[Array, ...]

    def select(self, *index: Array, options: slice = slice(None)) -> ModuleOptions:
        """Select rows of the module's table (an array), or one row and granularity."""
        index = options, *index
        needs = tuple((r, live[index], work[index]) for r, live, work in self.needs)
        seconds = tuple(s[(slice(None), *index)] for s in self.seconds)
        return ModuleOptions(self.options[options], needs, seconds)

    def with_option(self, option: int) -> ModuleOptions:
        return self.select(options=slice(option, option + 1))


@dataclass(frozen=True)
class BlockMinimum:
    """Minima over the options of a block of modules, [n_rows, n_granularities]."""

    fits: Array  # whether any combination fits into memory
    peak_bytes: Array  # lower bound of the maximum per device
    # By module and segment, [4, ...] as in `ModuleTable`; 0 where nothing fits.
    seconds: tuple[tuple[Array, ...], ...]

    def select(self, rows: Array) -> BlockMinimum:
        seconds = tuple(tuple(s[:, rows] for s in module) for module in self.seconds)
        return BlockMinimum(self.fits[rows], self.peak_bytes[rows], seconds)


def block_minimum(modules: Sequence[ModuleOptions], memory_bytes: float) -> BlockMinimum:
    """Return the minima over options of modules on the same devices; `memory_bytes` 0: no limit."""
    limit = memory_bytes or np.inf
    may_fit, peak_bytes = _options_that_may_fit(modules, limit)
    fits = np.logical_and.reduce([a.any(axis=0) for a in may_fit])
    if len(modules) > 1 and memory_bytes:
        for index in np.argwhere(fits & ~(_peak_of_smallest(modules) <= limit)):
            peak, _ = smallest_combination([m.select(*index) for m in modules])
            fits[tuple(index)] = peak <= limit
    seconds = (
        tuple(np.where(fits, np.where(a, s, np.inf).min(axis=1), 0.0) for s in m.seconds)
        for m, a in zip(modules, may_fit, strict=True)
    )
    return BlockMinimum(fits, peak_bytes, tuple(seconds))


def _options_that_may_fit(
    modules: Sequence[ModuleOptions], limit: float
) -> tuple[list[Array], Array]:
    """Return (for each module, whether each option fits if the other modules need their minimum;
    a lower bound of the peak bytes)."""
    minima = [[(r, s.min(axis=0), w.min(axis=0)) for r, s, w in m.needs] for m in modules]
    peaks = []
    for i, m in enumerate(modules):
        other_needs = [need for needs in (*minima[:i], *minima[i + 1 :]) for need in needs]
        peaks.append(_peak_bytes([*m.needs, *other_needs]))
    return [p <= limit for p in peaks], np.maximum.reduce([p.min(axis=0) for p in peaks])


def _peak_of_smallest(modules: Sequence[ModuleOptions]) -> Array:
    """Return peak bytes if every module has the option with its own minimum."""
    needs: list[SegmentNeed] = []
    for m in modules:
        i = sum(s + w for _, s, w in m.needs).argmin(axis=0)[None]
        needs += [(r, *(np.take_along_axis(a, i, 0)[0] for a in (s, w))) for r, s, w in m.needs]
    return _peak_bytes(needs)


def _peak_bytes(needs: Iterable[SegmentNeed]) -> Array:
    """Return the maximum peak bytes over resources."""
    return np.maximum.reduce(np.broadcast_arrays(*resource_peaks(needs).values()))


def _peaks_of(modules: Sequence[ModuleOptions], numbers: np.ndarray) -> Array:
    """Return peak bytes of combinations (`numbers`, [n_combinations, n_modules] of options)."""
    columns = zip(modules, numbers.T, strict=True)
    return _peak_bytes((r, live[o], work[o]) for m, o in columns for r, live, work in m.needs)


def smallest_combination(
    modules: Sequence[ModuleOptions],
) -> tuple[float, tuple[MemoryOption, ...]]:
    """Return (peak bytes, options) of the combination with the least memory at one table entry."""
    sizes = [len(m.options) for m in modules]
    numbers = np.indices(sizes).reshape(len(sizes), -1).T
    peaks = _peaks_of(modules, numbers)
    i = int(peaks.argmin())
    chosen = zip(modules, numbers[i].tolist(), strict=True)
    return float(peaks[i]), tuple(m.options[o] for m, o in chosen)


def best_combinations(
    modules: Sequence[ModuleOptions], memory_bytes: float
) -> Iterator[np.ndarray]:
    """Yield the numbers of each Pareto-optimal combination that fits, fastest first."""
    limit = memory_bytes or np.inf
    may_fit = [a.nonzero()[0] for a in _options_that_may_fit(modules, limit)[0]]
    numbers = np.stack(np.meshgrid(*may_fit, indexing="ij"), axis=-1).reshape(-1, len(modules))
    numbers = numbers[_peaks_of(modules, numbers) <= limit]
    seconds = np.concatenate(
        [np.concatenate(m.seconds)[:, o].T for m, o in zip(modules, numbers.T, strict=True)], axis=1
    )
    while len(numbers):
        fastest = int(seconds.sum(axis=1).argmin())
        is_equal = (seconds[:fastest] <= seconds[fastest] * (1 + ROUNDING)).all(axis=1)
        fastest = int(is_equal.argmax()) if is_equal.any() else fastest
        yield numbers[fastest]
        is_beaten = (seconds >= seconds[fastest] * (1 - ROUNDING)).all(axis=1)
        numbers, seconds = numbers[~is_beaten], seconds[~is_beaten]
