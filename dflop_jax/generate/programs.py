"""The mesh for generation, the sharding of parameters and rows, and three compiled programs: one
runs the prompts, one decodes a token per row, one enlarges the caches.

Shape suffixes: B rows, T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import (
    Array,
    Module,
    MultimodalModel,
    Params,
    chip_of,
    layer_kinds_of,
    on_chip,
    stacked_parts,
    tensor_parallel_dim,
)
from dflop_jax.generate import decoding
from dflop_jax.generate.decoding import Cache, GeneratingModule, inlet_layers
from dflop_jax.generate.row import LLM, AnswerRows, add_features, round_up_to_bucket
from dflop_jax.generate.sampling import Sampling, SamplingArgs, sample_tokens
from dflop_jax.runtime.module_parts import logical_axes, module_structs

Tree = Any
DATA, MODEL = "data", "model"
# Minimum number of tokens and cache slots of a row; larger numbers are doublings of it. At most
# this many slots are reserved for an answer at first; growing the cache compiles a program.
TOKEN_MULTIPLE = 128
# Fraction of device memory for parameters, from which the default tensor-parallel degree is
# chosen; the rest is for caches and activations.
PARAMS_SHARE = 0.7


def answer_mesh(devices: Sequence[jax.Device], tp: int, max_ranks: int) -> Mesh:
    """Return the mesh for generation with axes "data" (at most `max_ranks`, each with its own
    prompts) and "model". ValueError if `tp` does not divide the number of devices."""
    if tp < 1 or len(devices) % tp:
        raise ValueError(
            f"--tp {tp}: does not divide this process's {len(devices)} devices; give a number that "
            "does, or 0"
        )
    ranks = min(len(devices) // tp, max_ranks)
    return Mesh(np.array(devices[: ranks * tp]).reshape(ranks, tp), (DATA, MODEL))


def min_tp(model: MultimodalModel, devices: Sequence[jax.Device]) -> int:
    """Return the lowest tensor-parallel degree at which parameters fit; 1 if memory is unknown."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    if not limit:
        return 1
    structs = [module_structs(m) for m in model.modules.values()]
    needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(structs))
    divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    return next((n for n in divisors if needed <= n * PARAMS_SHARE * limit), len(devices))


def param_structs(module: Module, mesh: Mesh) -> Params:
    """Return shapes, compute dtypes and shardings of a module's parameters, layers stacked."""
    tp = int(mesh.shape[MODEL])

    def shard_struct(
        lead: int, a: jax.ShapeDtypeStruct, axes: tuple[Any, ...]
    ) -> jax.ShapeDtypeStruct:
        spec = P(*[None] * lead, *split_spec(a.shape[lead:], axes, tp))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    shards = {}
    for part, structs in module_structs(module).items():
        shard = partial(shard_struct, int(part in stacked_parts(module)))
        shards[part] = jax.tree.map(shard, structs, logical_axes(module, part))
    return shards


def split_spec(shape: Sequence[int], axes: Sequence[str | None], tp: int) -> tuple[str | None, ...]:
    """Return an array's partition spec over `MODEL`; all None if `tp` does not divide the dim."""
    dim = tensor_parallel_dim(shape, axes, tp)
    if dim is not None and shape[dim] % tp:
        dim = None
    return tuple(MODEL if i == dim else None for i in range(len(axes)))


class BatchState(NamedTuple):
    """The state of a batch of rows between decoding steps."""

    cache: Cache
    present_BV: Any  # bool, whether the token is in the prompt or the answer


class NewestTokens(NamedTuple):
    """The newest token of each row."""

    token_B: Any
    place_B: Any  # index in the row
    number_B: Any  # number of the answer, which seeds its sampling
    nth_B: Any  # number of the answer's tokens, this one included


Answers = tuple[BatchState, NewestTokens]


class AnswerPrograms:
    """A model's programs for generation on a mesh; ValueError if its LLM cannot generate."""

    def __init__(self, model: MultimodalModel, mesh: Mesh):
        chip = chip_of(mesh.devices.flat[0])
        llm: Any = on_chip(model.modules[LLM], chip)
        if not hasattr(llm, "memory") or not hasattr(llm, "logits"):
            raise ValueError(
                "the model's llm has no memory and logits "
                "(dflop_jax.generate.decoding.GeneratingModule); add them, or take another model"
            )
        self._mesh = mesh
        rows, every = P(DATA), P()
        by_kind = {k: P(None, DATA) for k in dict.fromkeys(layer_kinds_of(llm))}
        outs: Any = BatchState(Cache(by_kind, rows), rows), rows  # type: ignore[arg-type]
        start, step = partial(start_answers, model, chip), partial(decode_step, llm)
        self.start = self._compiled(start, (every, rows, rows, every), outs)
        self.step = self._compiled(step, (every, *outs, every), outs, donated=(1,))
        self.grow = self._compiled(partial(grow_slots, llm), outs, outs)
        self._shardings = partial(_shardings, llm, mesh)

    def tokens(
        self, params: dict[str, Params], rows: AnswerRows, number: np.ndarray, sampling: Sampling
    ) -> Iterator[np.ndarray]:
        """Yield the next token of every row, int32 [rows], up to `sampling.max_tokens` times.
        `number`, uint32 [rows], is each answer's number, which seeds its sampling."""
        put = partial(jax.device_put, device=NamedSharding(self._mesh, P(DATA)))
        draw = SamplingArgs.from_sampling(sampling)
        longest = int(rows.lengths.max())
        n_answer = min(sampling.max_tokens, TOKEN_MULTIPLE)
        slots = round_up_to_bucket(longest + n_answer, TOKEN_MULTIPLE)
        state, newest = self.start(params, put(rows), put(number), draw, slots=slots)
        for n in range(1, sampling.max_tokens):
            tokens = newest.token_B
            if longest + n > slots:
                slots *= 2
                state, newest = self.grow(state, newest, slots=slots)
            # The device runs this step while the host processes the previous tokens.
            state, newest = self.step(params, state, newest, draw)
            yield np.asarray(tokens)
        yield np.asarray(newest.token_B)

    def _compiled(self, function: Any, ins: Tree, outs: Tree, donated: tuple[int, ...] = ()) -> Any:
        """Compile a function to run on every data rank; XLA shards it over the model axis."""

        def whole(*args: Any, **fixed: Any) -> Any:
            mapped: Any = jax.shard_map(
                partial(function, **fixed),
                mesh=self._mesh,
                in_specs=ins,
                out_specs=outs,
                axis_names={DATA},
                check_vma=False,
            )
            results = mapped(*args)
            return jax.lax.with_sharding_constraint(results, self._shardings(results))

        return jax.jit(whole, static_argnames=("slots",), donate_argnums=donated)


def _shardings(llm: GeneratingModule, mesh: Mesh, results: Answers) -> tuple[Tree, Tree]:
    """Return a program's output shardings: rows over data ranks, heads of caches over `MODEL`."""
    tp = int(mesh.shape[MODEL])

    def cache_sharding(a: Array, axes: tuple[str | None, ...]) -> Any:
        _, *split = split_spec(a.shape[1:], axes, tp)
        return NamedSharding(mesh, P(None, DATA, *split))

    state, _ = results
    rows = NamedSharding(mesh, P(DATA))
    state_shardings, newest_shardings = jax.tree.map(lambda _: rows, results)
    by_kind = {
        kind: jax.tree.map(cache_sharding, tree, llm.memory(kind).axes)
        for kind, tree in state.cache.by_kind.items()
    }
    cache = state_shardings.cache._replace(by_kind=by_kind)
    return state_shardings._replace(cache=cache), newest_shardings


def start_answers(
    model: MultimodalModel,
    chip: str,
    params: dict[str, Params],
    rows: AnswerRows,
    number_B: Array,
    draw: SamplingArgs,
    *,
    slots: int,
) -> Answers:
    """Run the prompts and sample the first token of each answer."""
    llm: Any = on_chip(model.modules[LLM], chip)
    last_B = jnp.maximum(rows.lengths - 1, 0)
    batch = add_features(model, chip, params, rows)
    logits_BV, cache = decoding.prefill(llm, params[LLM], batch, last_B, slots, inlet_layers(model))
    B, V = logits_BV.shape
    tokens_BT = batch["tokens"]
    known_BT = jnp.arange(tokens_BT.shape[1])[None] <= last_B[:, None]
    present_BV = _mark_present(jnp.zeros((B, V), bool), jnp.where(known_BT, tokens_BT, V))
    nth_B = jnp.zeros_like(last_B)
    token_B = sample_tokens(draw, logits_BV, present_BV, number_B, nth_B)
    present_BV = _mark_present(present_BV, token_B[:, None])
    return BatchState(cache, present_BV), NewestTokens(token_B, last_B + 1, number_B, nth_B + 1)


def decode_step(
    llm: GeneratingModule,
    params: dict[str, Params],
    state: BatchState,
    newest: NewestTokens,
    draw: SamplingArgs,
) -> Answers:
    """Run the newest token of each row and sample the next one."""
    before_B, place_B, number_B, nth_B = newest
    logits_BV, cache = decoding.decode(llm, params[LLM], state.cache, before_B, place_B)
    token_B = sample_tokens(draw, logits_BV, state.present_BV, number_B, nth_B)
    present_BV = _mark_present(state.present_BV, token_B[:, None])
    return BatchState(cache, present_BV), NewestTokens(token_B, place_B + 1, number_B, nth_B + 1)


def grow_slots(
    llm: GeneratingModule, state: BatchState, newest: NewestTokens, *, slots: int
) -> Answers:
    """Return the same answers with caches enlarged to `slots` tokens per row."""
    return state._replace(cache=decoding.grow_cache(llm, state.cache, slots)), newest


def _mark_present(present_BV: Array, tokens_BT: Array) -> Array:
    """Return `present_BV` with these tokens set; ids beyond the vocabulary are ignored."""
    rows = jnp.arange(len(present_BV))[:, None]
    return present_BV.at[rows, tokens_BT].set(True, mode="drop")
