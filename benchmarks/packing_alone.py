"""Samples alone, computed by the model's own functions, layer by layer, in rows that are as long as
its pieces: nothing of the engine's programs, and no padding but of the shorter of its own media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from packing_cases import Seen, alone, leaves_of, pack_all, tokens_of

from dflop_jax.contract import (
    MultimodalModel,
    adapter_of,
    edges_of,
    layer_kinds_of,
    layer_of,
    taps_of,
    with_adapter,
)
from dflop_jax.data import Sample
from dflop_jax.records import Layout, Schedule
from dflop_jax.verify.compare import QUICKLY

Tree = Any


class AloneRun:
    """Samples by themselves, by given parameters or by ones of which every entry is moved, up or
    down at random, to the next number of its dtype: as far as that takes what comes out, rounding
    alone may."""

    def __init__(self, model: MultimodalModel, params: Mapping[str, Tree], layout: Layout):
        self._model, self._params, self._layout = model, params, layout
        self._moved = jax.tree.map(partial(_to_neighbours, np.random.default_rng(0)), params)
        cuts = {m: frozenset(s.stop for s in layout.segments_of(m) if not s.last)
                for m in model.modules}  # fmt: skip
        run = jax.value_and_grad(partial(_loss, model, cuts), has_aux=True)
        self._run = jax.jit(run, compiler_options=QUICKLY)

    def of(self, sample: Sample, *, moved: bool = False) -> Seen:
        """What comes out of a sample that is packed with nothing.

        Args:
          moved: whether by the moved parameters.
        """
        packing, shapes = alone(self._model, sample)
        schedule = Schedule(0, packing.groups(self._model, shapes))
        packed = pack_all(self._model, self._layout, schedule, [sample])
        modules = [g.module for g in schedule.groups]
        fields = {m: {k: a[0] for k, a in p.fields.items()}
                  for m, p in zip(modules, packed, strict=True)}  # fmt: skip
        places = {
            (modules[source], modules[g]): tuple(a[0] for a in where)
            for g, p in enumerate(packed)
            for source, where in p.places.items()
        }
        with jax.default_device(jax.devices("cpu")[0]):
            params = self._moved if moved else self._params
            (loss, given), gradients = self._run(params, fields, places)
        where = tokens_of(self._model, packing, 0, schedule, packed)
        outputs = {"loss": np.asarray(loss)}
        for name, array in given.items():
            module, what, *_ = name.split(" ")
            flat = np.asarray(array)
            if what == "after":
                outputs[name] = flat[where.tokens[module]]
            elif module in where.features:
                outputs[name] = flat.reshape(-1, flat.shape[-1])[where.features[module]]
        flat_gradients = {path: np.asarray(leaf) for path, leaf in leaves_of(gradients)}
        return Seen(outputs, flat_gradients)


def _to_neighbours(rng: np.random.Generator, a: np.ndarray) -> np.ndarray:
    ends = np.where(rng.random(a.shape) < 0.5, -np.inf, np.inf).astype(a.dtype)
    return np.nextafter(a, ends)


def _loss(
    model: MultimodalModel,
    cuts: Mapping[str, frozenset[int]],
    params: Mapping[str, Tree],
    fields: Mapping[str, Mapping[str, jax.Array]],
    places: Mapping[tuple[str, str], Sequence[jax.Array]],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the sum of all losses, hidden states at the cuts and features that modules give)."""
    given: dict[str, jax.Array] = {}
    loss = jnp.float32(0)
    for name, module in model.modules.items():
        if name not in fields:
            continue
        batch, inlets = dict(fields[name]), {}
        for edge in (e for e in edges_of(model) if e.target == name):
            rows, tokens = batch["segment_ids"].shape
            spec = module.field_spec(edge.name, rows, tokens)
            batch.setdefault(edge.name, jnp.zeros(spec.shape, spec.dtype))
            if edge.enters >= 0:
                inlets[edge.name] = edge.enters
            if edge.source in fields and (edge.source, name) in places:
                features = given[f"{edge.source} gives {edge.tap}"]
                batch[edge.name] += _read(features, *places[edge.source, name])
        loss += _through(name, module, params[name], batch, inlets, cuts[name], given)
    return loss, given


def _through(
    name: str,
    module: Any,
    params: Tree,
    batch: Mapping[str, jax.Array],
    inlets: Mapping[str, int],
    cuts: frozenset[int],
    given: dict[str, jax.Array],
) -> jax.Array:
    """Run a module, put what it gives into `given`, and return its loss."""
    x, done = module.entry(params["entry"], batch), Counter[str]()
    for i, kind in enumerate(("", *layer_kinds_of(module))):
        if i:
            own = {p: params[p] for p in (kind, adapter_of(kind)) if p in params}
            row = jax.tree.map(lambda a, n=done[kind]: a[n], own)
            x = layer_of(module, kind)(with_adapter(kind, row), x, batch)
            done[kind] += 1
        if i in cuts:
            given[f"{name} after {i}"] = x
        for inlet in (n for n, layers in inlets.items() if layers == i):
            x = module.inlet(inlet, x, batch[inlet], batch)
        for tap in (t for t, layers in taps_of(module).items() if layers == i):
            given[f"{name} gives {tap}"] = module.tap(tap, params.get(tap), x, batch)
    out = module.exit(params["exit"], x, batch, params["entry"] if module.tied else None)
    if isinstance(out, dict):
        return out["loss_sum"]
    given[f"{name} gives "] = out
    return jnp.float32(0)


def _read(features: jax.Array, index: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """Features [rows, tokens, width] at places [rows, tokens, sources], each token's added up."""
    flat = features.reshape(-1, features.shape[-1])
    share = jnp.where(index >= 0, 1.0 if weight is None else weight, 0.0)
    return jnp.einsum("rtk,rtkw->rtw", share.astype(flat.dtype), flat[jnp.maximum(index, 0)])
