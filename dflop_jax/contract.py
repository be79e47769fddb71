"""What the engine needs to know of a model: the only thing a model author has to provide.

A module is a stack of equal layers between two ends (entry and exit). Its functions are pure,
single-device code on one data rank's arrays; the engine adds sharding, pipelining and gradients
from outside. `models/` satisfies these protocols without importing this package, and any object
that does will train: Linen, NNX (split/merge) or plain functions.

Parameters of a module are one pytree `{"entry": ..., "layers": ..., "exit": ...}`; "layers" has a
leading dim of `n_layers`. A *part* is one of those three names, or "adapter": small parameters
beside each layer's (LoRA), which a module may list in `freeze_groups` and `inputs`. They are
stacked like "layers", and `layer` finds them in its parameters under the key "adapter".

Fields (`inputs`) are the host arrays of one microbatch on one data rank, leading dim `items`:
- vision: pixels uint8 [items, tile_px, tile_px, 3]
- audio: mel float32 [items, n_mels, frames]; mel_frames int32 [items], those that are no padding
- llm: tokens, segment_ids, positions, targets int32 [items, tokens]; weights float32
  [items, tokens], 1 where `targets` is supervised; is_visual bool [items, tokens], where an
  encoder's feature stands (of a tile or of sound); is_newline bool [items, tokens], where a model
  with weighted sources has its embedding of a line's end. Segment id 0 is padding. `visual` float
  [items, tokens, width] is made by the engine from the encoders' outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

Array = jax.Array
Params = Any
Batch = Mapping[str, Array]


class Module(Protocol):
    """One module of the model (an encoder with its connector, or the LLM); hashable, such as a
    frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def tied(self) -> bool:
        """Whether `exit` also reads the entry's parameters (a tied head)."""
        ...

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """Field names that each part reads."""
        ...

    @property
    def freeze_groups(self) -> Mapping[str, str]:
        """Name by which each part is frozen, e.g. {"entry": "vision", ..., "exit": "connector"}."""
        ...

    def field_spec(self, name: str, items: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a field on one data rank."""
        ...

    def init(self, part: str, key: Array) -> Params:
        """Float32 parameters of a part; for "layers" and "adapter" those of a single layer."""
        ...

    def logical_axes(self, part: str) -> Params:
        """The same tree as `init`, a tuple of logical axis names (or None) per array."""
        ...

    def entry(self, params: Params, batch: Batch) -> Array:
        """Fields -> hidden states [items, tokens, width]."""
        ...

    def layer(self, params: Params, x: Array, batch: Batch) -> Array:
        """One layer on hidden states."""
        ...

    def exit(self, params: Params, x: Array, batch: Batch, entry: Params | None) -> Any:
        """Encoder: features [items, tokens_per_item, llm_width]. LLM: {"loss_sum": scalar, ...},
        sums over the microbatch, all differentiable with respect to "loss_sum" only."""
        ...

    def flops(self, part: str, items: int, tokens: int) -> float:
        """Forward FLOPs of a part (one layer for "layers"); a multiply-add counts two."""
        ...


class GeneratingModule(Module, Protocol):
    """An LLM that also answers (`dflop generate`); training needs none of this."""

    def prefill(self, params: Params, batch: Batch, last: Array, slots: int) -> tuple[Array, Any]:
        """Run one prompt per row, index `last` its last token: (float32 logits [items, vocab] of
        what follows, a cache for `slots` positions). `batch` has the fields of entry and layers."""
        ...

    def decode(
        self, params: Params, cache: Any, tokens: Array, positions: Array
    ) -> tuple[Array, Any]:
        """Run one more token of each row, int32 [items], at its position: (logits, cache)."""
        ...


class MultimodalModel(Protocol):
    """Modules in topological order (encoders, then "llm"), and what the data must look like."""

    @property
    def modules(self) -> Mapping[str, Module]: ...

    @property
    def item_tokens(self) -> Mapping[str, int]:
        """By encoder, the tokens that it works on for one item (patches of a tile)."""
        ...

    @property
    def preprocessing(self) -> Mapping[str, Mapping[str, Any]]:
        """By encoder, how its media are prepared: see `dflop_jax.data.MediaSpec`. An encoder whose
        features are summed with weights into LLM tokens says of how many ("sources")."""
        ...

    @property
    def vocab_size(self) -> int: ...

    # A model that can be trained by adapters also has `with_lora(rank, alpha)`, which gives the
    # model whose "llm" has a part "adapter" in the freeze group "lora".


# Logical axis names that tensor parallelism splits over the mesh axis "model".
MODEL_SHARDED = frozenset({"heads", "kv_heads", "mlp", "vocab"})
