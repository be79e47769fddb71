"""Every program that a layout needs, compiled ahead, and the arrays they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.communicator import absent, is_local
from dflop_jax.pipeline.exchange import Exchange
from dflop_jax.pipeline.layout import make_segments
from dflop_jax.pipeline.pieces import ADAPTER
from dflop_jax.pipeline.segment import EVALUATE, Kind, Segment
from dflop_jax.pipeline.stand_in import packed_field
from dflop_jax.pipeline.update import SegmentUpdate
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Group, Layout, Shape
from dflop_jax.tasks.graph import Link, fed_by, links, resources, tied_ends, with_backward

Tree = Any
Job = Callable[[], jax.stages.Lowered]
Program = Callable[..., Any]
KEEPING = "keeping more"  # in the key of a program under its segment's second recompute policy
PIECES = 4  # in a row, where programs are timed


@dataclass(frozen=True)
class GroupArrays:
    """Host arrays of one group: `fields[name]` [M, ranks * rows, ...], and by the place in the
    schedule of every group that feeds it where its outputs stand, `places[group]`: index, or index
    and weight, [M, ranks * rows, tokens, sources]. `most[group]` is what `Routes.route` asks for
    where not all ranks' places are here."""

    fields: Mapping[str, np.ndarray]
    places: Mapping[int, tuple[np.ndarray, ...]]
    most: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """What a segment takes and gives at one shape, as sharded structs."""

    shape: Shape
    x: dict[str, jax.ShapeDtypeStruct]
    fields: dict[str, jax.ShapeDtypeStruct]
    y: dict[str, Tree]


class Programs:
    """Segments, updates and exchanges of a layout with their compiled programs.

    A segment has programs for every shape of its module; an edge for every pair of shapes that the
    layout's buckets join.
    """

    def __init__(
        self,
        model: MultimodalModel,
        layout: Layout,
        tx: optax.GradientTransformation,
        *,
        devices: list[jax.Device],
        clip_norm: float,
        freeze: tuple[str, ...],
        rate_factors: Mapping[str, float],
        evaluates: bool,
    ):
        self.model, self.layout, self.evaluates = model, layout, evaluates
        self.segments = make_segments(model, layout, devices, freeze=freeze)
        # Of some segments the programs under their second recompute policy.
        self.keeping = {
            n: replace(s, plan=s.plan.keeping)
            for n, s in self.segments.items()
            if s.plan.remat_less is not None
        }
        self.trainable = tuple(n for n, s in self.segments.items() if s.trainable)
        self.backward = with_backward(layout, self.trainable)
        self.owner_of = tied_ends(layout)
        self.reader_of = {owner: reader for reader, owner in self.owner_of.items()}
        self.updates = {
            n: SegmentUpdate(
                self.segments[n],
                tx,
                clip_norm,
                rate_factors,
                adds_shared=self._trains_shared(self.reader_of.get(n)),
            )
            for n in self.trainable
        }
        self.local = frozenset(n for n, s in self.segments.items() if is_local(s.mesh))
        # Collectives of CPU devices hold threads of a pool that has one for each device, so that
        # two programs in flight on the same devices can wait for each other for ever.
        self.crowded = frozenset(
            n
            for n, s in self.segments.items()
            if s.mesh.size > 1 and s.mesh.devices.flat[0].platform == "cpu"
        )
        every = links(layout)
        self.into = {n: tuple(k for k in every if k.target == n) for n in self.segments}
        self.out_of = {n: tuple(k for k in every if k.source == n) for n in self.segments}
        self.submesh = {s.name: s.submesh for s in layout.segments}
        of = resources(layout)
        self.resource = {s.name: of[s.submesh] for s in layout.segments}
        self.autotunes = any(
            s.mesh.devices.flat[0].platform != "cpu" for s in self.segments.values()
        )
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        # Tracing shapes takes milliseconds, so what steps ask for is kept.
        self.signature = cache(self._signature)
        self.exchange = cache(self._exchange)
        self._elsewhere = cache(self._skipped)

    def _trains_shared(self, reader: str | None) -> bool:
        return reader is not None and "entry" in self.segments[reader].trainable

    def _signature(self, segment: str, shape: Shape) -> Signature:
        s = self.segments[segment]
        return Signature(shape, s.x_structs(shape), s.field_structs(shape), s.y_structs(shape))

    def _exchange(self, link: Link, low: Shape, high: Shape) -> Exchange:
        assert link.edge is not None
        return Exchange(
            self.segments[link.source].output_struct(link.edge, low),
            self.signature(link.target, high).x[link.edge.name],
            link.edge.sources,
            self.layout.exchange_room(link.edge, low, high),
        )

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """Kinds of programs that a segment runs; one that nobody reads has no forward of its own in
        training."""
        forward = (FORWARD,) if self.out_of[name] else ()
        back = (BACKWARD,) if name in self.backward or not self.out_of[name] else ()
        loss = (EVALUATE,) if self.evaluates and self.segments[name].has_loss else ()
        return (*forward, *back, *loss)

    def forward_kind(self, name: str, evaluate: bool) -> Kind:
        return EVALUATE if evaluate and self.segments[name].has_loss else FORWARD

    def _shape_pairs(self, link: Link) -> list[tuple[Shape, Shape]]:
        """Shapes of a source and a target group that a bucket joins."""
        low, high = (self.segments[n].plan.module for n in (link.source, link.target))
        pairs = ((b.shape(low), b.shape(high)) for b in self.layout.buckets)
        return list(dict.fromkeys((a, b) for a, b in pairs if a is not None and b is not None))

    # ---- compiling ----

    def compile(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> int:
        """Compile everything that runs on this process, in the order of the plan's segments, which
        is the same on every process; returns how many programs were to be compiled: equal segments
        on the same devices share theirs.

        One of the processes that run a program compiles it. After `sync`, which waits for all
        processes, the others find it in the compilation cache, if there is one: the same binary,
        so that its collectives run in one order everywhere. Where compiling tunes kernels on the
        devices, that is the first of them, so that none tunes while another computes; else they
        take turns.
        """
        every = {k: job for name in self.segments if name in self.local
                 for k, job in self._jobs_of(name).items()}  # fmt: skip
        jobs = {k: job for k, job in every.items() if self._first_alike[k[0]] == k[0]}
        mine = {k for i, k in enumerate(jobs) if self._compiled_by(k, i) == jax.process_index()}
        mine = {k for k in jobs if (self._forward_of(k) or k) in mine}
        for keys in (mine, jobs.keys() - mine):
            # Tracing is serial anyway (it holds the GIL); XLA compiles in parallel.
            # Kernels that are timed together would time, or wait for, each other.
            with ThreadPoolExecutor(1 if self.autotunes else 4) as pool:
                running: dict[Any, Future[jax.stages.Compiled]] = {}
                for k in (k for k in jobs if k in keys):
                    if forward := self._forward_of(k):
                        self.learn(forward, running[forward].result())
                    running[k] = pool.submit(jobs[k]().compile)
                for key, job in running.items():
                    self._compiled[key] = job.result()
                    if on_progress:
                        on_progress(len(self._compiled), len(jobs))
            sync()
        for name, *key in every:
            self._compiled[name, *key] = self._compiled[self._first_alike[name], *key]
        return len(jobs)

    @cached_property
    def _first_alike(self) -> dict[str, str]:
        """Of every segment the first one whose programs are the same: of layers inside a module
        that no edge touches, as many of them on the same devices."""
        first: dict[Segment, str] = {}
        found = {}
        for name, s in self.segments.items():
            inside = {"layers", ADAPTER} >= {*s.own_parts} and not s.outgoing and not s.inlets
            plan = replace(s.plan, name="", start=0, stop=s.plan.n_layers)
            found[name] = first.setdefault(replace(s, plan=plan), name) if inside else name
        return found

    def segment_of(self, key: Any) -> Segment:
        """The segment that the program of a key is of, under the recompute policy that it has."""
        return self.keeping[key[0]] if KEEPING in key else self.segments[key[0]]

    def _forward_of(self, key: Any) -> Any:
        """The program that has to be compiled before another can be lowered, if any: of forward,
        whose compiler chooses how the residuals are split."""
        segment, forward = self.segment_of(key), (*key[:-1], FORWARD)
        split = key[-1] == BACKWARD and segment.hands_over and segment.splits_tensors
        return forward if split else None

    def learn(self, key: Any, compiled: jax.stages.Compiled) -> None:
        """Take from a compiled program what others need to be lowered."""
        segment = self.segment_of(key)
        if key[-1] == FORWARD and segment.hands_over and segment.splits_tensors:
            segment.learn_residuals(key[1], compiled)

    def _compiled_by(self, key: Any, i: int) -> int:
        """Which of the processes that run program number `i` compiles it."""
        mesh = self.segments[key[0]].mesh
        sharing = sorted({d.process_index for d in mesh.devices.flat})
        return sharing[0 if self.autotunes else i % len(sharing)]

    def _jobs_of(self, name: str) -> dict[Any, Job]:
        """Programs of a segment, by keys that begin with its name."""
        segment = self.segments[name]
        jobs: dict[Any, Job] = {}
        for shape in self.layout.shapes(segment.plan.module):
            for kind in self.kinds(name):
                jobs[name, shape, kind] = partial(segment.lower, shape, kind)
            for kind in (FORWARD, BACKWARD) if name in self.keeping else ():
                jobs[name, shape, KEEPING, kind] = partial(self.keeping[name].lower, shape, kind)
            for struct in self._summed(name, shape):
                jobs[name, "sum", struct] = partial(_lower_sum, struct)
        for link in self.out_of[name]:
            if link.edge is None:
                continue
            for low, high in self._shape_pairs(link):
                exchange = self.exchange(link, low, high)
                for backward in (False, True) if name in self.backward else (False,):
                    jobs[name, link, low, high, backward] = partial(
                        exchange.lower, backward=backward
                    )
        if name in self.updates:
            update = self.updates[name]
            jobs[name, REDUCE] = update.lower_reduce
            jobs[name, UPDATE] = partial(update.lower_update, len(self.updates))
        return jobs

    def jobs(self) -> dict[Any, Job]:
        """Every program of the plan, those of other processes too, ready to be lowered, by keys
        that begin with a segment's name."""
        return {k: job for name in self.segments for k, job in self._jobs_of(name).items()}

    def _summed(self, name: str, shape: Shape) -> list[jax.ShapeDtypeStruct]:
        """What comes to a segment in several parts: an input that several modules, several groups
        of one or several rounds may bring, and the gradient of an output that several edges carry,
        or one in rounds."""
        segment = self.segments[name]
        x = self.signature(name, shape).x
        inputs = [k.edge.name for k in self.into[name] if k.edge]
        found = [x[n] for n in dict.fromkeys(inputs) if self._in_parts(name, n)]
        carried = [k.edge for k in self.out_of[name] if k.edge]
        taps = [e.tap for e in carried]
        in_rounds = segment.data_ranks > 1
        found += [
            segment.output_struct(e, shape) for e in carried if in_rounds or taps.count(e.tap) > 1
        ]
        return list(dict.fromkeys(found))

    def _in_parts(self, name: str, field: str) -> bool:
        """Whether more than one group, or more than one round of an exchange, may bring an
        input."""
        sources = {k.edge.source for k in self.into[name] if k.edge and k.edge.name == field}
        in_rounds = any(self.layout.data_ranks(m) > 1 for m in sources)
        return len(sources) > 1 or self.layout.fan_in > 1 or in_rounds

    # A program on devices of other processes only is not run here: its outputs are arrays of which
    # this process holds nothing.

    def of_segment(self, name: str, group: Group, kind: Kind) -> Program:
        """What runs a group; evaluation and generation have no second policy."""
        if name not in self.local:
            return self._elsewhere(name, kind, group.shape)
        keeping = (KEEPING,) if name in group.remat_less else ()
        return self._compiled[name, group.shape, *keeping, kind]

    def of_exchange(self, link: Link, low: Shape, high: Shape, *, backward: bool) -> Program:
        """One round of an exchange; a task may have several, which wait for nothing of each other,
        so they end one by one where devices are crowded."""
        if link.source not in self.local:
            return self._elsewhere(link, "scatter" if backward else "gather", (low, high))
        program = self._compiled[link.source, link, low, high, backward]
        return partial(_awaited, program) if link.source in self.crowded else program

    def of_update(self, name: str, direction: str) -> Program:
        if name not in self.local:
            return self._elsewhere(name, direction, None)
        return self._compiled[name, direction]

    def add(self, name: str, parts: list[jax.Array], struct: jax.ShapeDtypeStruct) -> jax.Array:
        """The sum of arrays of a segment's submesh."""
        total, *rest = parts
        for part in rest:
            if name in self.local:
                total = self._compiled[name, "sum", struct](total, part)
        return total

    def _skipped(self, what: Any, kind: str, shapes: Any) -> Program:
        outputs = jax.tree.map(absent, self.output_structs(what, kind, shapes))
        return lambda *_: outputs

    def output_structs(self, what: Any, kind: str, shapes: Any) -> Tree:
        """What a program of a segment (its name) or of a link gives, but for residuals."""
        structs: Any
        if kind in (FORWARD, EVALUATE):  # without residuals, of which only their shapes are known
            structs = self.segments[what].y_structs(shapes, sums=kind == EVALUATE)
        elif kind == BACKWARD:
            structs = self.segments[what].output_structs(shapes, kind)
        elif kind in (REDUCE, UPDATE):
            update = self.updates[what]
            structs = update.reduced_structs() if kind == REDUCE else update.updated_structs()
        else:
            exchange = self.exchange(what, *shapes)
            structs = exchange.block_structs if kind == "gather" else exchange.gradient_structs
        return structs

    # ---- groups that stand in for a batch's ----

    def stand_in_groups(self, bucket: int) -> tuple[tuple[Group, ...], tuple[GroupArrays, ...]]:
        """One group of every module of a bucket, without samples, and arrays as those of full rows
        are: `pipeline.stand_in`."""
        shapes = dict(self.layout.buckets[bucket].shapes)
        place = {m: i for i, m in enumerate(shapes)}
        groups = []
        for m, shape in shapes.items():
            row: tuple[int, ...] = ()
            ranks = ((row,) * shape.rows,) * self.layout.data_ranks(m)
            feeds = tuple(place[t] for t in self.layout.targets(m) if t in place)
            groups.append(Group(m, shape, (ranks,) * self.layout.group_size, feeds))
        return tuple(groups), self.stand_in_arrays(groups)

    def stand_in_arrays(self, groups: Sequence[Group]) -> tuple[GroupArrays, ...]:
        """Arrays of groups as those of full rows are, whatever samples the groups hold."""
        sources = fed_by(groups)
        return tuple(
            self._stand_in_arrays(g, {i: groups[i] for e in self.layout.edges
                                      for i in sources.get((n, e.source), ())})
            for n, g in enumerate(groups)
        )  # fmt: skip

    def _stand_in_arrays(self, group: Group, sources: Mapping[int, Group]) -> GroupArrays:
        """`sources`: the groups that feed it, by their place."""
        fields: dict[str, np.ndarray] = {}
        places: dict[int, tuple[np.ndarray, ...]] = {}
        below = self.model.vocab_size
        for s in self.layout.segments_of(group.module):
            structs = self.signature(s.name, group.shape).fields
            fields |= {n: packed_field(n, a.shape, a.dtype, PIECES, below)
                       for n, a in structs.items()}  # fmt: skip
            for link in self.into[s.name]:
                for i, source in sources.items():
                    if link.edge is not None and link.edge.source == source.module:
                        exchange = self.exchange(link, source.shape, group.shape)
                        places[i] = exchange.stand_in_places()
        return GroupArrays(fields, places)


def _awaited(program: Program, *args: Any) -> Any:
    return jax.block_until_ready(program(*args))


def _lower_sum(struct: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
    # Nothing is donated: what arrived may be the very buffer that was sent.
    return jax.jit(jnp.add, out_shardings=struct.sharding).lower(struct, struct)
