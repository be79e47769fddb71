"""The model protocol: the functions and facts that a model author provides to the engine.

A model is a graph: modules, and edges that place outputs of one module into another. A module is a
sequence of layers between an entry and an exit. Its functions are pure, single-device code on one
data rank's arrays; the engine adds sharding, pipelining and gradients, and knows no modality.
`models/` satisfies these protocols without importing this package. Any object that satisfies them
can be trained: Linen, NNX (split/merge) or plain functions.

Parameters of a module are one pytree `{"entry": ..., "layers": ..., "exit": ...}`; "layers" has a
leading dim of `n_layers`. A *part* is one of those three names; the name of a tap (see `taps`) with
parameters of its own; or the adapters (LoRA) of another part, which a module may list in
`freeze_groups` and `inputs`: "adapter" for "layers", PART_adapter for any other part. Adapters are
stacked if their part is; its function finds them in its parameters under the key "adapter". The
entry of a tied module has no adapters.

If layers differ, `layer_kinds` has the kind of each. Instead of "layers" the module then has a part
named after each kind, with the parameters of that kind's layers stacked in their order. Layers of
one kind have equal parameter shapes, computation and cost.

Fields (`inputs`) are the arrays of one microbatch on one data rank: [rows, tokens, ...] with a
value for every token, or [rows, ...] with a value for every piece (a tile's pixels), one per row.
The packer copies them from samples, except for
- segment_ids int32 [rows, tokens]: the number of the piece in its row, from 1; 0 in padding;
- positions int32 [rows, tokens] or [rows, tokens, ...], equal in further dims: counts from 0 in
  each piece, unless the samples have this field;
- seeds uint32 [rows, tokens], or [rows] if a row is a piece: seeds for random numbers in layers,
  such as dropout. A seed depends on data.seed, the step, the sample's place in the batch, the piece
  and the token's position in it, but not on the plan or the packing. It is 0 in padding and in
  evaluation, which draws no random numbers.
If edges have the name of a field, the engine fills it with outputs of other modules, and zeros
elsewhere. A module with a loss reads float32 "weights" [rows, tokens], the weight of every token's
loss; the loss is divided by their sum over the global batch.
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
# Names that `layer` gives by `jax.ad_checkpoint.checkpoint_name` to small, expensive values, such
# as attention's output. The recompute policy "named" saves them and little else.
SAVED_NAMES = ("attention",)
# Name of sums of a product and a bias that are saved in place of the product.
SUM_NAME = "sum"
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
        """Names of the fields that each part reads."""

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        """Name by which each part is frozen, e.g. {"entry": "vision", ..., "exit": "connector"}."""

    def field_spec(self, name: str, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a field on one data rank."""

    def init(self, part: str, key: Array) -> Params:
        """Float32 parameters of a part; for a stacked part, those of a single layer."""

    def logical_axes(self, part: str) -> Params:
        """The tree of `init` with a tuple of logical axis names (or None) for each array."""

    def entry(self, params: Params, batch: Batch) -> Array:
        """Fields -> hidden states [rows, tokens, width], or a tree of [rows, tokens, ...]."""

    def layer(self, params: Params, x: Array, batch: Batch) -> Array: ...

    def exit(self, params: Params, x: Array, batch: Batch, entry: Params | None) -> Any:
        """Features [rows, features, width] for the modules that read them. For a module with a
        loss, {"loss_sum": scalar, ...}: sums over the microbatch, all differentiable with respect
        to "loss_sum" only. `entry`: the entry's parameters if the module is tied."""

    # Optional members of a module:
    #
    # layer_kinds: tuple[str, ...]: the kind of each of the `n_layers`, in any order. `layer` then
    #   also takes the keyword `kind`.
    # taps: Mapping[str, int]: name -> number of layers before the tap. `tap(name, params, x,
    #   batch)` returns its outputs [rows, features, width]; `params` are those of the part with
    #   that name, None if the module's `inputs` has no such part.
    # inlet(name, x, placed, batch): adds the outputs of an edge, scattered to their token positions
    #   in `placed`, to the hidden states between two layers; returns [rows, tokens, width].
    # loss_weight: factor of the module's loss in the sum of all losses.
    # content(tokens, placed): the amount of each content feature in a piece of `tokens` tokens, as
    #   integers by name in a fixed order. `placed` has, for the name of an edge, the lengths of the
    #   runs of its outputs in the piece. Without it the only feature is "pair", pairs of tokens.
    # attention_flops: Mapping[str, float]: forward FLOPs of one layer's attention per unit of each
    #   content feature or of "token": those of products of two activations, for tokens that attend
    #   to each other. With `layer_kinds`, such a mapping by kind. Without it these products are
    #   counted for all pairs of a piece's tokens.
    # skips: whether its kernel skips all other pairs (except in partly used tiles), so that the
    #   time of a call depends on the content of its pieces; may be a mapping by kind, too.
    # numbers_layers: whether `layer` also reads "layer", int32 [], from its batch: the index of the
    #   layer among those of its kind.
    # allows_nondeterminism: whether its programs may sum in any order on a GPU, so bits can differ.
    # working_dtype: dtype of the parameters that its functions get; float32 by default. For other
    #   dtypes the optimizer keeps float32 masters of trained parameters.
    # float32_names: names (last keys of paths) of parameters that stay float32 with any working
    #   dtype, also in exports, and that have no weight decay.
    # on_chip(chip): returns the variant of the module for that chip.


def layer_kinds_of(module: Module) -> tuple[str, ...]:
    """Return the kind of every layer of a module."""
    return getattr(module, "layer_kinds", None) or (LAYERS,) * module.n_layers


def layer_of(module: Module, kind: str) -> Callable[[Params, Array, Batch], Array]:
    """Return the module's `layer` for one kind."""
    of_kinds: Any = module.layer
    return partial(of_kinds, kind=kind) if hasattr(module, "layer_kinds") else of_kinds


def adapter_of(part: str) -> str:
    """Return the name of the part with another part's adapters."""
    return ADAPTER if part == LAYERS else f"{part}_{ADAPTER}"


def with_adapter(part: str, params: Mapping[str, Params]) -> Params:
    """Return the parameters for the function of a part, with its adapter, or None."""
    adapter = adapter_of(part)
    if adapter not in params:
        return params.get(part)
    return {**params[part], ADAPTER: params[adapter]}


def stacked_parts(module: Module) -> dict[str, str]:
    """Return {part: kind} of the stacked parts, which have a row for each layer of the kind."""
    kinds = dict.fromkeys(layer_kinds_of(module))
    adapters = {adapter_of(kind): kind for kind in kinds}
    own_adapters = {part: kind for part, kind in adapters.items() if part in module.freeze_groups}
    return {**{kind: kind for kind in kinds}, **own_adapters}


def n_stacked_layers(module: Module, part: str) -> int:
    """Return the number of layers in a stacked part of a module."""
    return layer_kinds_of(module).count(stacked_parts(module)[part])


def fold_adapters(module: Module, params: dict[str, Params], *each: Any) -> dict[str, Params]:
    """Return a module's parts with its adapters folded in; `each` as in its `merged`."""
    fold = getattr(module, "merged", None)
    return fold(params, *each) if fold else params


def taps_of(module: Module) -> Mapping[str, int]:
    """Return the number of layers before each of a module's taps."""
    return getattr(module, "taps", {})


def content_of(
    module: Module, tokens: int, placed: Mapping[str, Sequence[int]] | None = None
) -> dict[str, int]:
    """Return the module's `content` of a piece; `placed` None: a piece of text."""
    count = getattr(module, "content", None)
    return dict(count(tokens, placed or {})) if count else {PAIR: token_pairs(tokens)}


def content_flops_of(module: Module) -> dict[str, float]:
    """Return a layer's forward FLOPs per unit of each content feature; {} if attention is computed
    for whole rows."""
    if not getattr(module, "skips", False):
        return {}
    flops = getattr(module, "attention_flops", None) or {}
    return {name: float(f) for name, f in flops.items() if f > 0 and name != TOKEN}


def attention_flops_of(module: Module) -> Callable[[int], float] | None:
    """Return a function from a text's tokens to a layer's attention FLOPs (forward), or None."""
    flops: Mapping[str, float] | None = getattr(module, "attention_flops", None)
    if flops is None:
        return None

    def needed(tokens: int) -> float:
        amounts = {TOKEN: tokens, **content_of(module, tokens)}
        return sum(f * amounts[name] for name, f in flops.items())

    return needed


def working_dtype_of(module: Module) -> np.dtype:
    """Return the module's `working_dtype`."""
    return np.dtype(getattr(module, "working_dtype", np.float32))


def float32_names_of(module: Module) -> frozenset[str]:
    """Return the module's `float32_names`."""
    return frozenset(getattr(module, "float32_names", ()))


def last_key(path: Any) -> str:
    """Return the name of a parameter from its path in a tree; "" if the tree is one array."""
    return str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1]))) if path else ""


def chip_of(device: Any) -> str:
    """Return the compile target of a device: such as "sm_90" for NVIDIA, else the platform."""
    capability = str(getattr(device, "compute_capability", "")).replace(".", "")
    return f"sm_{capability}" if capability.isdigit() else str(device.platform)


def on_chip(module: Module, chip: str) -> Module:
    """Return the module's variant for a chip (see `chip_of`)."""
    choose = getattr(module, "on_chip", None)
    return choose(chip) if choose else module


class MultimodalModel(Protocol):
    """Modules in topological order, the edges between them, and the format of the data."""

    @property
    def modules(self) -> Mapping[str, Module]: ...

    @property
    def edges(self) -> Sequence[Mapping[str, Any]]:
        """The fields of a `records.Edge` for each pair of modules where the later reads outputs of
        the earlier. `leaves` of a tap may be omitted, since `taps` has it."""

    @property
    def piece_tokens(self) -> Mapping[str, int]:
        """For modules with one piece per row: its tokens (patches of a tile). Other modules read
        "segment_ids" and pack pieces of any length into a row."""

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        """By module, the form in which it reads media and that form's parameters: see
        `dflop_jax.data.MediaSpec`."""

    @property
    def vocab_size(self) -> int: ...

    # A model whose data are not records of text and media names their source, MODULE:FUNCTION, in
    # `data_factory`, as the configuration does in data.factory.
    #
    # A model that can be trained with adapters also has `with_lora(rank, alpha, targets=, ranks=,
    # dropout=)`. It returns a model with adapters, in the freeze group "lora", of the matrices that
    # match the patterns `targets`; (pattern, rank) pairs in `ranks` override `rank`. An adapted
    # module has `merged(params, each)`, which returns the parts with its adapters folded in (`each`
    # as in `models.lora`). A model may have `with_objective(z_loss, label_smoothing)`. It returns a
    # model with the same "loss_sum", whose gradient is that of the loss plus these terms.
    # A model may have `with_fp8()`. It returns a model whose layers compute products in FP8.


def edges_of(model: MultimodalModel) -> tuple[Edge, ...]:
    """Return the model's edges as records; ValueError if one has an unknown module or tap."""
    edges = []
    for facts in model.edges:
        source = model.modules.get(facts["source"])
        tap = facts.get("tap", "")
        if source is None or facts["target"] not in model.modules:
            raise ValueError(f"edge {dict(facts)} names a module that the model does not have")
        if tap and tap not in taps_of(source):
            raise ValueError(f"edge {dict(facts)}: {facts['source']!r} has no tap {tap!r}")
        leaves = {"leaves": taps_of(source)[tap]} if tap else {}
        edges.append(Edge(**{**facts, **leaves}))
    return tuple(edges)


# Logical axes that tensor parallelism splits over the mesh axis "model".
MODEL_SHARDED = frozenset({"heads", "kv_heads", "mlp", "vocab"})
# Logical axes that are replicated if the degree does not divide them.
_OR_WHOLE = frozenset({"kv_heads", "vocab"})


def tensor_parallel_dim(shape: Sequence[int], axes: Sequence[str | None], tp: int) -> int | None:
    """Return the dim of a parameter with logical axes `axes` that tensor parallelism of degree `tp`
    splits; None if there is none. `tp` may not divide the dim."""
    for i, (size, name) in enumerate(zip(shape, axes, strict=True)):
        if name in MODEL_SHARDED and not (name in _OR_WHOLE and size % tp):
            return i
    return None
