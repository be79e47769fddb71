"""Pack samples into rows of a model's last module (the LLM or a clip generator), and run the
encoders whose features it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

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
from dflop_jax.data.content import features_per_row
from dflop_jax.data.packing import pack_groups
from dflop_jax.plan.placement import Parallelism, build_layout
from dflop_jax.records import Bucket, Group, MeshShape, PackedPieces, Schedule, Shape
from dflop_jax.runtime.exchange import gather_features
from dflop_jax.runtime.module_parts import split_into_loops
from dflop_jax.schedule.batch import first_fit_decreasing

LLM = "llm"  # name of the module that generates text
NO_CACHES: Mapping[str, Any] = MappingProxyType({})
TokenMixer = Callable[..., tuple[Array, Any]]


class AnswerRows(NamedTuple):
    """Samples in rows of the last module, and their pieces in rows of each encoder; rows are
    ordered by data rank."""

    fields: Mapping[str, Any]  # of the last module's entry, layers and exit, [rows, t]
    media: Mapping[str, Mapping[str, Any]]  # encoder with input -> its fields
    # By encoder, the indices of its features on the data rank, and weights, if any
    # (`PackedGroup.gathers`), [rows, t, K] each.
    places: Mapping[str, tuple[Any, ...]]
    lengths: Any  # number of tokens in each row without padding


def pack_row(samples: Sequence[Sample], model: MultimodalModel, token_multiple: int) -> AnswerRows:
    """Pack samples one after the other into one row, padded to a multiple of `token_multiple`."""

    def bucket(tokens: int) -> int:
        return -(-tokens // token_multiple) * token_multiple

    shape = Shape(1, bucket(sum(s.load.tokens(last_module(model)) for s in samples)))
    n = np.arange(len(samples))
    positions = PackedPieces.from_columns(n, *np.zeros((3, len(n)), np.int64))
    return _build_rows(samples, model, positions, shape, 1, bucket)


def pack_rows(
    samples: Sequence[Sample], model: MultimodalModel, ranks: int, rows: int, token_multiple: int
) -> AnswerRows:
    """Pack each sample into its own row, round-robin over `ranks` data ranks of `rows` rows."""
    n = np.arange(len(samples))
    bucket = partial(round_up_to_bucket, smallest=token_multiple)
    shape = Shape(rows, bucket(max(s.load.tokens(last_module(model)) for s in samples)))
    positions = PackedPieces.from_columns(n, np.zeros_like(n), n % ranks, n // ranks)
    return _build_rows(samples, model, positions, shape, ranks, bucket)


def last_module(model: MultimodalModel) -> str:
    return list(model.modules)[-1]


def round_up_to_bucket(n: int, smallest: int) -> int:
    """Return the smallest number that is at least `n` and is `smallest` times a power of two."""
    return smallest << (max(1, -(-n // smallest)) - 1).bit_length()


def _build_rows(
    samples: Sequence[Sample],
    model: MultimodalModel,
    last_places: PackedPieces,
    last_shape: Shape,
    ranks: int,
    bucket: Callable[[int], int],
) -> AnswerRows:
    """Return the rows of samples that have one piece each in the last module, at `last_places`."""
    loads, last = [s.load for s in samples], last_module(model)
    encoders = [m for m in model.modules if m != last and any(load.lengths(m) for load in loads)]
    groups = []
    for m in encoders:
        lengths = np.array([n for load in loads for n in load.lengths(m)])
        rank = np.repeat(last_places.rank, [len(load.lengths(m)) for load in loads])
        tokens = int(lengths.max()) if m in model.piece_tokens else bucket(int(lengths.max()))
        row = np.zeros_like(lengths)
        for is_on_rank in (rank == r for r in range(ranks)):
            row[is_on_rank] = first_fit_decreasing(lengths[is_on_rank], tokens)
        shape = Shape(1 << int(row.max()).bit_length(), tokens)
        positions = PackedPieces.from_columns(np.arange(len(row)), np.zeros_like(row), rank, row)
        groups.append(Group(m, shape, (len(encoders),), pieces=positions))
    groups.append(Group(last, last_shape, pieces=last_places))
    n_layers = {m: module.n_layers for m, module in model.modules.items()}
    parallelism = [Parallelism(MeshShape(data=ranks))] * len(n_layers)
    layout = replace(
        build_layout(parallelism, [0] * len(n_layers), n_layers),
        buckets=(Bucket.from_shapes({g.module: g.shape for g in groups}),),
        edges=edges_of(model),
    )
    schedule = Schedule(0, tuple(groups))
    packed = pack_groups(layout, schedule, samples, loads, model=model)
    *media, fields = ({k: a[0] for k, a in p.fields.items()} for p in packed)
    lengths = np.zeros(ranks * last_shape.rows, np.int32)
    row_indices = last_places.rank * last_shape.rows + last_places.row
    np.add.at(lengths, row_indices, [load.tokens(last) for load in loads])
    places = {}
    for g, m in enumerate(encoders):
        whole = tuple(a[0] for a in packed[-1].gathers[g])
        places[m] = _rank_feature_index(model, groups[g], whole, ranks)
    return AnswerRows(fields, dict(zip(encoders, media, strict=True)), places, lengths)


def _rank_feature_index(
    model: MultimodalModel, group: Group, positions: tuple[np.ndarray, ...], ranks: int
) -> tuple[np.ndarray, ...]:
    """Convert indices into the features of all data ranks to indices into the own rank's."""
    edge = next(
        e for e in edges_of(model) if (e.source, e.target) == (group.module, last_module(model))
    )
    features = features_per_row(model.modules[group.module], edge, group.shape)
    index, *weight = positions
    first = np.repeat(np.arange(ranks) * group.shape.rows * features, len(index) // ranks)
    rank_index = np.where(index >= 0, index - first[:, None, None], -1).astype(index.dtype)
    return rank_index, *weight


def encode_media(module: Module, params: Params, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Return an encoder's features [rows, features, width] by tap; "" is its exit."""
    x, layers_done, outputs = module.entry(with_adapter("entry", params), batch), 0, {}
    taps = taps_of(module)
    for stop in sorted({*taps.values(), module.n_layers}):
        (x, _), layers_done = run_layers(module, params, x, batch, layers_done, stop), stop
        for name in (name for name, n in taps.items() if n == stop):
            outputs[name] = module.tap(name, with_adapter(name, params), x, batch)  # type: ignore[attr-defined]
    entry = params["entry"] if module.tied else None
    return {**outputs, "": module.exit(with_adapter("exit", params), x, batch, entry)}


def run_layers(
    module: Module,
    params: Params,
    x: Array,
    batch: Mapping[str, Array],
    start: int,
    stop: int,
    mix: TokenMixer | None = None,
    caches: Mapping[str, Any] = NO_CACHES,
) -> tuple[Array, dict[str, Any]]:
    """Run layers `start` to `stop` - 1. Return hidden states, and stacked caches by kind: of all
    layers of the kind if `caches` has it, else of the layers that ran. For `mix` see
    `decoding.run_decoder`."""
    kinds, by_kind, made = layer_kinds_of(module), dict(caches), defaultdict(list)
    for loop in split_into_loops(kinds[start:stop]):
        layers = []
        for kind, rows in zip(loop.period, loop.rows(kinds[start:stop]), strict=True):
            first = kinds[:start].count(kind)
            cut = slice(first + rows.start, first + rows.stop, rows.step)
            kind_params = {p: params[p] for p in (kind, adapter_of(kind)) if p in params}
            kind_params = jax.tree.map(lambda a, cut=cut: a[cut], kind_params)
            numbers = jnp.arange(cut.start, cut.stop, cut.step)
            layers.append((numbers, with_adapter(kind, kind_params)))
        run = partial(_run_period, module, loop.period, batch, mix)
        # Caches are carried, not scanned over, so that a layer writes one slot in place.
        (x, by_kind), stacks = jax.lax.scan(run, (x, by_kind), tuple(layers))
        for kind in dict.fromkeys(loop.period) if stacks else ():
            of_kind = [a for k, a in zip(loop.period, stacks, strict=True) if k == kind]
            made[kind].append(jax.tree.map(_interleave, *of_kind))
    for kind, parts in made.items():
        by_kind[kind] = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return x, by_kind


def _run_period(
    module: Module,
    kinds: Sequence[str],
    batch: Mapping[str, Array],
    mix: TokenMixer | None,
    carry: tuple[Array, dict[str, Any]],
    layers: Sequence[tuple[Array, Params]],
) -> tuple[tuple[Array, dict[str, Any]], tuple[Any, ...]]:
    """Run one layer of each of `kinds`; return (hidden states, updated caches), new caches."""
    x, caches, made = carry[0], dict(carry[1]), []
    for kind, (number, params) in zip(kinds, layers, strict=True):
        layer: Any = layer_of(module, kind)
        if mix is None:
            x = layer(params, x, batch)
            continue
        results: list[Any] = []
        mix_layer = partial(mix, kind, number, caches.get(kind))

        def mix_and_keep(
            *args: Any, mix: Any = mix_layer, results: list[Any] = results, **options: Any
        ) -> Array:
            output, cache = mix(*args, **options)
            results.append(cache)
            return output

        x = layer(params, x, batch, mix=mix_and_keep)
        assert len(results) == 1, f"a layer of kind {kind!r} mixes its tokens {len(results)} times"
        if kind in caches:
            caches[kind] = results[0]
        else:
            made += results
    return (x, caches), tuple(made)


def _interleave(*stacks: Array) -> Array:
    """Interleave the rows of several stacks."""
    return jnp.stack(stacks, axis=1).reshape(-1, *stacks[0].shape[1:])


def add_features(
    model: MultimodalModel, chip: str, params: Mapping[str, Params], rows: AnswerRows
) -> dict[str, Array]:
    """Return the fields of the last module's rows, with the encoders' features gathered."""
    last, batch = last_module(model), dict(rows.fields)
    edges = [e for e in edges_of(model) if e.target == last]
    for edge in edges:
        shape = next(iter(rows.fields.values())).shape
        spec = model.modules[last].field_spec(edge.name, *shape[:2])
        batch[edge.name] = jnp.zeros(spec.shape, spec.dtype)
    for encoder, fields in rows.media.items():
        outputs = encode_media(on_chip(model.modules[encoder], chip), params[encoder], fields)
        for edge in (e for e in edges if e.source == encoder):
            batch[edge.name] += gather_features(outputs[edge.tap], *rows.places[encoder])
    return batch
