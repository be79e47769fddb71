"""What the engine needs to know of a model: the only thing a model author has to provide.

A model is a graph: modules, and edges that place outputs of one module into another. A module is a
sequence of layers between two ends (entry and exit). Its functions are pure, single-device code
on one data rank's arrays; the engine adds sharding, pipelining and gradients from outside and knows
no modality. `models/` satisfies these protocols without importing this package, and any object
that does will train: Linen, NNX (split/merge) or plain functions.

Parameters of a module are one pytree `{"entry": ..., "layers": ..., "exit": ...}`; "layers" has a
leading dim of `n_layers`. A *part* is one of those three names; the name of a tap (see `taps`), if
it has parameters of its own; or the adapters of another part, small parameters beside its own
(LoRA), which a module may list in `freeze_groups` and `inputs`: "adapter" those of "layers",
PART_adapter those of any other. They are stacked where that part is, and its function finds them in
its parameters under the key "adapter". The entry of a tied module has none.

Where layers differ, `layer_kinds` names the kind of each, and in the place of "layers" the module
has a part of every kind's name: the parameters of that kind's layers, stacked in their order.
Layers are of one kind if they share the shapes of their parameters, what they compute and so what
they cost.

Fields (`inputs`) are the arrays of one microbatch on one data rank: [rows, tokens, ...] where every
token has a value, or [rows, ...] where every piece has one (a tile's pixels) and a row is a piece.
The packer copies them from samples, except for
- segment_ids int32 [rows, tokens]: from 1 in each row, one for each piece, 0 is padding;
- positions int32 [rows, tokens] or, alike in further dims, [rows, tokens, ...], unless the samples
  have it: counts from 0 in each piece;
- seeds uint32 [rows, tokens], or [rows] where a row is a piece: for what layers draw, a number of
  each token, or piece, that follows from data.seed, the step, the sample's place in the batch, the
  piece and the token's position in it, and from no plan and no packing. It is 0 in padding, and
  everywhere in evaluation, where nothing is drawn.
A field that edges are named after is filled by the engine with outputs of other modules, zeros
where none stands. A module with a loss reads float32 "weights" [rows, tokens], the weight of every
token's loss; their sum over the global batch is the loss's denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from dflop_jax.records import LAYERS, PAIR, TOKEN, Edge, token_pairs

Array = jax.Array
Params = Any
ADAPTER = "adapter"
# What `layer` names with `jax.ad_checkpoint.checkpoint_name`: values that are small and expensive,
# such as attention's output. The recompute policy "named" saves them and little else.
SAVED_NAMES = ("attention",)
Batch = Mapping[str, Array]


class Module(Protocol):
    """One module of the model; hashable, such as a frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether `exit` also reads the entry's parameters (a tied head)."""

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """Field names that each part reads."""

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        """Name by which each part is frozen, e.g. {"entry": "vision", ..., "exit": "connector"}."""

    def field_spec(self, name: str, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a field on one data rank."""

    def init(self, part: str, key: Array) -> Params:
        """Float32 parameters of a part; of one that is stacked those of a single layer."""

    def logical_axes(self, part: str) -> Params:
        """The same tree as `init`, a tuple of logical axis names (or None) per array."""

    def entry(self, params: Params, batch: Batch) -> Array:
        """Fields -> hidden states [rows, tokens, width], or a tree of [rows, tokens, ...]."""

    def layer(self, params: Params, x: Array, batch: Batch) -> Array: ...

    def exit(self, params: Params, x: Array, batch: Batch, entry: Params | None) -> Any:
        """Features [rows, features, width] for the modules that read them, or, of a module with a
        loss, {"loss_sum": scalar, ...}: sums over the microbatch, all differentiable with respect
        to "loss_sum" only. `entry` are the entry's parameters where the module is tied."""

    # What follows a module may have.
    #
    # layer_kinds: tuple[str, ...]: the kind of each of the `n_layers`, in any order. `layer` then
    #   also takes `kind`, by name.
    # taps: Mapping[str, int]: name -> layers that have run where an edge leaves. `tap(name, params,
    #   x, batch)` gives its outputs [rows, features, width]; `params` are those of the part of that
    #   name, None if the module's `inputs` has no such part.
    # inlet(name, x, placed, batch): the hidden states [rows, tokens, width] after the outputs of an
    #   edge, which stand at their places in `placed`, were read between two layers.
    # loss_weight: what the module's loss is multiplied by in the sum of all losses.
    # content(tokens, placed): how much a piece of so many tokens has of each feature of content, by
    #   name in one order, whole numbers. `placed` has, by the name of an edge, how many of its
    #   outputs stand together, run by run. Without it the one feature is "pair", pairs of tokens.
    # attention_flops: Mapping[str, float]: forward FLOPs that one layer's attention needs for a
    #   unit of each of these features, or of "token": of the products of two activations, for the
    #   tokens that see each other. With `layer_kinds`, such a mapping by kind. Without it these
    #   products are counted for all pairs of a piece's tokens.
    # skips: whether its kernel computes no more than that, but for whole tiles, so that a call
    #   costs what the content of its pieces does; may be a mapping by kind, too.
    # numbers_layers: whether `layer` also finds in its batch "layer", int32 [], which of the layers
    #   of its kind it is.
    # any_order: whether its programs may add up in any order on a GPU: bits are almost equal.
    # working_dtype: in which its functions are given their parameters; float32 if it does not say.
    #   Of those that train the optimizer then keeps float32 masters.
    # float32_names: names (last keys of paths) of parameters that stay float32 whatever the working
    #   dtype is, in exports too, and that weight decay leaves out.
    # on_chip(chip): the module as that chip computes it best.


def layer_kinds_of(module: Module) -> tuple[str, ...]:
    """The kind of every layer of a module."""
    return getattr(module, "layer_kinds", None) or (LAYERS,) * module.n_layers


def layer_of(module: Module, kind: str) -> Callable[[Params, Array, Batch], Array]:
    """`layer` of one kind."""
    of_kinds: Any = module.layer
    return partial(of_kinds, kind=kind) if hasattr(module, "layer_kinds") else of_kinds


def adapter_of(part: str) -> str:
    """The part with the adapters of another, which may be a kind of layers."""
    return ADAPTER if part == LAYERS else f"{part}_{ADAPTER}"


def with_adapter(part: str, params: Mapping[str, Params]) -> Params:
    """The parameters that the function of a part gets, its adapter included, or None."""
    adapter = adapter_of(part)
    if adapter not in params:
        return params.get(part)
    return {**params[part], ADAPTER: params[adapter]}


def stacked_parts(module: Module) -> dict[str, str]:
    """Parts that are stacked, one row for each layer of a kind, and that kind."""
    kinds = dict.fromkeys(layer_kinds_of(module))
    adapters = {adapter_of(kind): kind for kind in kinds}
    own_adapters = {part: kind for part, kind in adapters.items() if part in module.freeze_groups}
    return {**{kind: kind for kind in kinds}, **own_adapters}


def n_stacked_layers(module: Module, part: str) -> int:
    """Layers of a module that have a row in a stacked part."""
    return layer_kinds_of(module).count(stacked_parts(module)[part])


def fold_adapters(module: Module, params: dict[str, Params], *each: Any) -> dict[str, Params]:
    """Parts of a module with its adapters, if any, folded in; `each` as in its `merged`."""
    fold = getattr(module, "merged", None)
    return fold(params, *each) if fold else params


def taps_of(module: Module) -> Mapping[str, int]:
    """Layers that have run where each of a module's taps leaves."""
    return getattr(module, "taps", {})


def content_of(
    module: Module, tokens: int, placed: Mapping[str, Sequence[int]] | None = None
) -> dict[str, int]:
    """See `content` above; `placed` None: a piece of text."""
    count = getattr(module, "content", None)
    return dict(count(tokens, placed or {})) if count else {PAIR: token_pairs(tokens)}


def content_flops_of(module: Module) -> dict[str, float]:
    """Forward FLOPs that a layer spends on a unit of each feature of content; none where attention
    is computed for whole rows."""
    if not getattr(module, "skips", False):
        return {}
    flops = getattr(module, "attention_flops", None) or {}
    return {name: float(f) for name, f in flops.items() if f > 0 and name != TOKEN}


def attention_flops_of(module: Module) -> Callable[[int], float] | None:
    """Forward FLOPs of a layer's attention for a piece of text, by its tokens; None: not known."""
    flops: Mapping[str, float] | None = getattr(module, "attention_flops", None)
    if flops is None:
        return None

    def needed(tokens: int) -> float:
        amounts = {TOKEN: tokens, **content_of(module, tokens)}
        return sum(f * amounts[name] for name, f in flops.items())

    return needed


def working_dtype_of(module: Module) -> np.dtype:
    """See `working_dtype` above."""
    return np.dtype(getattr(module, "working_dtype", np.float32))


def float32_names_of(module: Module) -> frozenset[str]:
    """See `float32_names` above."""
    return frozenset(getattr(module, "float32_names", ()))


def last_key(path: Any) -> str:
    """The name of a parameter, given its path in a tree; "" of a tree that is one array."""
    return str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1]))) if path else ""


def chip_of(device: Any) -> str:
    """What programs are compiled for: "sm_90", say, for NVIDIA's devices, else the platform."""
    capability = str(getattr(device, "compute_capability", "")).replace(".", "")
    return f"sm_{capability}" if capability.isdigit() else str(device.platform)


def on_chip(module: Module, chip: str) -> Module:
    """The module with what a chip, as `chip_of` names it, runs best."""
    choose = getattr(module, "on_chip", None)
    return choose(chip) if choose else module


class MultimodalModel(Protocol):
    """Modules in topological order, how they are joined, and what the data must look like."""

    @property
    def modules(self) -> Mapping[str, Module]: ...

    @property
    def edges(self) -> Sequence[Mapping[str, Any]]:
        """Which outputs of a module stand at places of a later one: the fields of `records.Edge`.
        `leaves` of a tap may be left out, `taps` says it."""

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """Of the modules that take one piece a row: its tokens (patches of a tile). The others
        read "segment_ids" and pack pieces of any length into a row."""

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        """By module, the form in which it takes media and that form's facts: see
        `dflop_jax.data.MediaSpec`."""

    @property
    def vocab_size(self) -> int: ...

    # A model whose data are no records of text and media says with `data_factory` where they come
    # from, MODULE:FUNCTION as in the configuration's data.factory.
    #
    # A model that can be trained by adapters also has `with_lora(rank, alpha, targets=, ranks=,
    # dropout=)`, which gives the model whose modules have adapters, in the freeze group "lora", of
    # the matrices that the patterns `targets` name, of a rank that (pattern, rank) of `ranks` say
    # of some. An adapted module has `merged(params, each)`: parts of the plain one, its adapters
    # folded in (`each` as in `models.lora`). A model with `with_objective(z_loss, label_smoothing)`
    # gives the model whose "loss_sum" is the plain one, with the gradient of the sum of both.


def edges_of(model: MultimodalModel) -> tuple[Edge, ...]:
    """The model's edges as records; ValueError when one names no module or tap of it."""
    edges = []
    for facts in model.edges:
        source = model.modules.get(facts["source"])
        tap = facts.get("tap", "")
        if source is None or facts["target"] not in model.modules:
            raise ValueError(f"edge {dict(facts)} joins modules that the model lacks")
        if tap and tap not in taps_of(source):
            raise ValueError(f"edge {dict(facts)}: {facts['source']!r} has no tap {tap!r}")
        leaves = {"leaves": taps_of(source)[tap]} if tap else {}
        edges.append(Edge(**{**facts, **leaves}))
    return tuple(edges)


# Logical axis names that tensor parallelism splits over the mesh axis "model".
MODEL_SHARDED = frozenset({"heads", "kv_heads", "mlp", "vocab"})
# Those that are whole on every device where the degree does not divide them.
_OR_WHOLE = frozenset({"kv_heads", "vocab"})


def split_dim(shape: Sequence[int], axes: Sequence[str | None], tp: int) -> int | None:
    """The dim of a parameter, whose dims have the logical names `axes`, that tensor parallelism
    splits over `tp` devices, if any; it may not divide."""
    for i, (size, name) in enumerate(zip(shape, axes, strict=True)):
        if name in MODEL_SHARDED and not (name in _OR_WHOLE and size % tp):
            return i
    return None
