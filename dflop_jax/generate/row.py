"""Samples as one row of the LLM, with what its encoders take, and the fields that the LLM reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import (
    Array,
    Module,
    MultimodalModel,
    Params,
    adapter_of,
    edges_of,
    layer_kinds_of,
    layer_of,
    on_chip,
    taps_of,
    with_adapter,
)
from dflop_jax.data import Sample
from dflop_jax.data.packing import pack_group
from dflop_jax.pipeline.gather import gather_features
from dflop_jax.pipeline.periods import Loop, loops_over
from dflop_jax.records import (
    Bucket,
    Group,
    Layout,
    PiecePlaces,
    Plan,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)

LLM = "llm"  # the module that answers


@dataclass(frozen=True, eq=False)
class Row:
    """Samples one after the other in a row padded to `t` tokens; their pieces of each encoder, a
    piece a row, padded to a power of two.

    Attributes:
      fields: of the LLM's entry, layers and exit, [1, t]; `length` of the tokens are no padding.
      media: by encoder, its fields; without those that nothing is given to.
      places: by encoder, where its features stand (`PackedGroup.places`), [1, t, K] each.
      pieces: by encoder, how many rows of its fields are no padding.
    """

    fields: dict[str, np.ndarray]
    media: dict[str, dict[str, np.ndarray]]
    places: dict[str, tuple[np.ndarray, ...]]
    length: int
    pieces: dict[str, int]


def row_of(samples: Sequence[Sample], model: MultimodalModel, token_multiple: int) -> Row:
    """Return the row of some samples, its tokens padded to a multiple."""
    loads = [s.load for s in samples]
    lengths = {m: [n for load in loads for n in load.lengths(m)] for m in model.modules}
    encoders = [m for m in model.modules if m != LLM and lengths[m]]
    groups = []
    for m in encoders:
        n = np.arange(len(lengths[m]))
        shape = Shape(1 << (len(n) - 1).bit_length(), max(lengths[m]))
        places = PiecePlaces.of(n, np.zeros_like(n), np.zeros_like(n), n)
        groups.append(Group(m, shape, (len(encoders),), pieces=places))
    length = sum(lengths[LLM])
    tokens = -(-length // token_multiple) * token_multiple
    n = np.arange(len(samples))
    places = PiecePlaces.of(n, *np.zeros((3, len(n)), np.int64))
    groups.append(Group(LLM, Shape(1, tokens), pieces=places))
    plan, schedule = _whole(model, groups), Schedule(0, tuple(groups))
    packed = [
        pack_group(plan.layout, schedule, g, samples, loads, model=model)
        for g in range(len(groups))
    ]
    fields = [{k: a[0] for k, a in p.fields.items()} for p in packed]
    return Row(
        fields=fields[-1],
        media=dict(zip(encoders, fields, strict=False)),
        places={m: tuple(a[0] for a in packed[-1].places[g]) for g, m in enumerate(encoders)},
        length=length,
        pieces={m: len(lengths[m]) for m in encoders},
    )


def _whole(model: MultimodalModel, groups: Sequence[Group]) -> Plan:
    """Return a plan of the whole model on one device, with the shapes of these groups."""
    segments = (
        SegmentPlan(name, name, 0, module.n_layers, "all", True, True)
        for name, module in model.modules.items()
    )
    return Plan(
        "prompt",
        Layout(
            (SubmeshPlan("all", 0),),
            tuple(segments),
            (Bucket.of({g.module: g.shape for g in groups}),),
            edges=edges_of(model),
        ),
    )


def encode(module: Module, params: Params, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Features [rows, features, width] that an encoder makes of its fields: by tap, and "" those
    of its exit."""
    x, done, outputs = module.entry(with_adapter("entry", params), batch), 0, {}
    taps = taps_of(module)
    for stop in sorted({*taps.values(), module.n_layers}):
        x, done = run_layers(module, params, x, batch, done, stop), stop
        for name in (name for name, n in taps.items() if n == stop):
            outputs[name] = module.tap(name, with_adapter(name, params), x, batch)  # type: ignore[attr-defined]
    entry = params["entry"] if module.tied else None
    return {**outputs, "": module.exit(with_adapter("exit", params), x, batch, entry)}


def run_layers(
    module: Module, params: Params, x: Array, batch: Mapping[str, Array], start: int, stop: int
) -> Array:
    """Hidden states after the layers from `start` to before `stop`."""
    for loop, _, period in loops_of(module, params, start, stop):
        x, _ = jax.lax.scan(partial(_run_period, module, loop.period, batch), x, period)
    return x


def loops_of(
    module: Module, params: Params, start: int, stop: int
) -> Iterator[tuple[Loop, tuple[range, ...], tuple[Params, ...]]]:
    """Loops that go through the layers from `start` to before `stop`. With each, for every layer of
    its period, the numbers of its repeats among the module's layers of its kind, and what these
    get, stacked."""
    kinds = layer_kinds_of(module)
    for loop in loops_over(kinds[start:stop]):
        period, numbers = [], []
        for kind, rows in zip(loop.period, loop.rows(kinds[start:stop]), strict=True):
            first = kinds[:start].count(kind)
            own = {p: params[p] for p in (kind, adapter_of(kind)) if p in params}
            here = range(first + rows.start, first + rows.stop, rows.step)
            cut = slice(here.start, here.stop, here.step)
            period.append(with_adapter(kind, jax.tree.map(lambda a, cut=cut: a[cut], own)))
            numbers.append(here)
        yield loop, tuple(numbers), tuple(period)


def _run_period(
    module: Module, kinds: Sequence[str], batch: Mapping[str, Array], x: Array, params: Params
) -> tuple[Array, None]:
    for kind, layer in zip(kinds, params, strict=True):
        x = layer_of(module, kind)(layer, x, batch)
    return x, None


def with_features(
    model: MultimodalModel,
    chip: str,
    params: Mapping[str, Params],
    fields: Mapping[str, Array],
    media: Mapping[str, Mapping[str, Array]],
    places: Mapping[str, tuple[Array, ...]],
) -> dict[str, Array]:
    """Return the fields of a `Row`'s LLM, those that edges bring among them: features of its media
    at their places, by what the chip runs best."""
    llm, batch = model.modules[LLM], dict(fields)
    edges = [e for e in edges_of(model) if e.target == LLM]
    for edge in edges:
        spec = llm.field_spec(edge.name, *fields["tokens"].shape)
        batch[edge.name] = jnp.zeros(spec.shape, spec.dtype)
    for encoder, given in media.items():
        outputs = encode(on_chip(model.modules[encoder], chip), params[encoder], given)
        for edge in (e for e in edges if e.source == encoder):
            where = (a[None] for a in places[encoder])
            batch[edge.name] += gather_features(outputs[edge.tap][None], *where)[0]
    return batch
