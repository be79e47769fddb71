"""Samples as rows of a model's last module, the LLM or a generator of clips, with what the modules
before it take, and the fields that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from dflop_jax.records import (
    Bucket,
    Group,
    Layout,
    MeshShape,
    PackedPieces,
    Schedule,
    Shape,
)
from dflop_jax.runtime.exchange import gather_features
from dflop_jax.runtime.module_parts import LayerLoop, split_into_loops
from dflop_jax.schedule.batch import first_fit_decreasing

LLM = "llm"  # the module that answers


class AnswerRows(NamedTuple):
    """Samples in rows of the last module, and their pieces in rows of each module before it, on
    `ranks` data ranks: the first rows are the first rank's, and so on.

    Attributes:
      fields: of the last module's entry, layers and exit, [rows, t]; `lengths` of the tokens of
        each row are no padding.
      media: by earlier module, its fields; without those that nothing is given to.
      places: by earlier module, where its features stand (`PackedGroup.gathers`), [rows, t, K]
        each, counted among those of the rank.
    """

    fields: Mapping[str, Any]
    media: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, tuple[Any, ...]]
    lengths: Any


def pack_row(samples: Sequence[Sample], model: MultimodalModel, token_multiple: int) -> AnswerRows:
    """Return some samples one after the other in one row, padded to a multiple of tokens."""

    def bucket(tokens: int) -> int:
        return -(-tokens // token_multiple) * token_multiple

    shape = Shape(1, bucket(sum(s.load.tokens(last_module(model)) for s in samples)))
    n = np.arange(len(samples))
    positions = PackedPieces.from_columns(n, *np.zeros((3, len(n)), np.int64))
    return _build_rows(samples, model, positions, shape, 1, bucket)


def pack_rows(
    samples: Sequence[Sample], model: MultimodalModel, ranks: int, rows: int, token_multiple: int
) -> AnswerRows:
    """Return each sample in a row of its own, dealt to `ranks` of so many rows; rows may be left
    empty. Tokens are padded to one of few numbers."""
    n = np.arange(len(samples))
    assert len(samples) <= ranks * rows, (len(samples), ranks, rows)
    bucket = partial(round_up_to_bucket, smallest=token_multiple)
    shape = Shape(rows, bucket(max(s.load.tokens(last_module(model)) for s in samples)))
    positions = PackedPieces.from_columns(n, np.zeros_like(n), n % ranks, n // ranks)
    return _build_rows(samples, model, positions, shape, ranks, bucket)


def last_module(model: MultimodalModel) -> str:
    """The module that answers."""
    return list(model.modules)[-1]


def round_up_to_bucket(n: int, smallest: int) -> int:
    """The smallest of `smallest`, twice, four times ... that many, that is at least `n`."""
    return smallest << (max(1, -(-n // smallest)) - 1).bit_length()


def _build_rows(
    samples: Sequence[Sample],
    model: MultimodalModel,
    last_places: PackedPieces,
    last_shape: Shape,
    ranks: int,
    bucket: Callable[[int], int],
) -> AnswerRows:
    loads, last = [s.load for s in samples], last_module(model)
    encoders = [m for m in model.modules if m != last and any(load.lengths(m) for load in loads)]
    rank_of = np.zeros(len(samples), np.int64)
    rank_of[last_places.piece_id] = last_places.rank
    groups = []
    for m in encoders:
        lengths = np.array([n for load in loads for n in load.lengths(m)])
        rank = np.repeat(rank_of, [len(load.lengths(m)) for load in loads])
        tokens = int(lengths.max()) if m in model.piece_tokens else bucket(int(lengths.max()))
        row = np.zeros_like(lengths)
        for is_on_rank in (rank == r for r in range(ranks)):
            row[is_on_rank] = first_fit_decreasing(lengths[is_on_rank], tokens)
        shape = Shape(1 << int(row.max()).bit_length(), tokens)
        positions = PackedPieces.from_columns(np.arange(len(row)), np.zeros_like(row), rank, row)
        groups.append(Group(m, shape, (len(encoders),), pieces=positions))
    groups.append(Group(last, last_shape, pieces=last_places))
    layout, schedule = _unsplit_layout(model, groups, ranks), Schedule(0, tuple(groups))
    packed = pack_groups(layout, schedule, samples, loads, model=model)
    fields = [{k: a[0] for k, a in p.fields.items()} for p in packed]
    lengths = np.zeros(ranks * last_shape.rows, np.int32)
    row_indices = last_places.rank * last_shape.rows + last_places.row
    np.add.at(lengths, row_indices, [loads[k].tokens(last) for k in last_places.piece_id])
    whole = {m: tuple(a[0] for a in packed[-1].gathers[g]) for g, m in enumerate(encoders)}
    return AnswerRows(
        fields=fields[-1],
        media=dict(zip(encoders, fields, strict=False)),
        places={m: _rank_feature_index(model, g, whole[m], ranks)
                for m, g in zip(encoders, groups, strict=False)},
        lengths=lengths,
    )  # fmt: skip


def _rank_feature_index(
    model: MultimodalModel, group: Group, positions: tuple[np.ndarray, ...], ranks: int
) -> tuple[np.ndarray, ...]:
    """Places counted among the features of their own rank, where they are among those of all."""
    edge = next(
        e for e in edges_of(model) if (e.source, e.target) == (group.module, last_module(model))
    )
    features = features_per_row(model.modules[group.module], edge, group.shape)
    index, *weight = positions
    first = np.repeat(np.arange(ranks) * group.shape.rows * features, len(index) // ranks)
    rank_index = np.where(index >= 0, index - first[:, None, None], -1).astype(index.dtype)
    return rank_index, *weight


def _unsplit_layout(model: MultimodalModel, groups: Sequence[Group], ranks: int) -> Layout:
    """Return the whole model on so many data ranks, with the shapes of these groups."""
    n_layers = {m: module.n_layers for m, module in model.modules.items()}
    laid = build_layout(
        [Parallelism(MeshShape(data=ranks))] * len(n_layers), [0] * len(n_layers), n_layers
    )
    bucket = Bucket.from_shapes({g.module: g.shape for g in groups})
    return replace(laid, buckets=(bucket,), edges=edges_of(model))


def encode_media(module: Module, params: Params, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Features [rows, features, width] that an encoder makes of its fields: by tap, and "" those
    of its exit."""
    x, layers_done, outputs = module.entry(with_adapter("entry", params), batch), 0, {}
    taps = taps_of(module)
    for stop in sorted({*taps.values(), module.n_layers}):
        x, layers_done = run_layers(module, params, x, batch, layers_done, stop), stop
        for name in (name for name, n in taps.items() if n == stop):
            outputs[name] = module.tap(name, with_adapter(name, params), x, batch)  # type: ignore[attr-defined]
    entry = params["entry"] if module.tied else None
    return {**outputs, "": module.exit(with_adapter("exit", params), x, batch, entry)}


def run_layers(
    module: Module, params: Params, x: Array, batch: Mapping[str, Array], start: int, stop: int
) -> Array:
    """Hidden states after the layers from `start` to before `stop`."""
    for loop, _, period in layer_loops(module, params, start, stop):
        x, _ = jax.lax.scan(partial(_run_period, module, loop.period, batch), x, period)
    return x


def layer_loops(
    module: Module, params: Params, start: int, stop: int
) -> Iterator[tuple[LayerLoop, tuple[range, ...], tuple[Params, ...]]]:
    """Loops that go through the layers from `start` to before `stop`. With each, for every layer of
    its period, the numbers of its repeats among the module's layers of its kind, and what these
    get, stacked."""
    kinds = layer_kinds_of(module)
    for loop in split_into_loops(kinds[start:stop]):
        period, numbers = [], []
        for kind, rows in zip(loop.period, loop.rows(kinds[start:stop]), strict=True):
            first = kinds[:start].count(kind)
            kind_params = {p: params[p] for p in (kind, adapter_of(kind)) if p in params}
            layer_numbers = range(first + rows.start, first + rows.stop, rows.step)
            cut = slice(layer_numbers.start, layer_numbers.stop, layer_numbers.step)
            period.append(with_adapter(kind, jax.tree.map(lambda a, cut=cut: a[cut], kind_params)))
            numbers.append(layer_numbers)
        yield loop, tuple(numbers), tuple(period)


def _run_period(
    module: Module, kinds: Sequence[str], batch: Mapping[str, Array], x: Array, params: Params
) -> tuple[Array, None]:
    for kind, layer in zip(kinds, params, strict=True):
        x = layer_of(module, kind)(layer, x, batch)
    return x, None


def add_features(
    model: MultimodalModel,
    chip: str,
    params: Mapping[str, Params],
    rows: AnswerRows,
) -> dict[str, Array]:
    """Return the fields of the last module's rows, those that edges bring among them: features at
    their places, by what the chip runs best."""
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
