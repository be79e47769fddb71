"""What generating needs to know of a model beside `dflop_jax.contract`: how an LLM remembers the
tokens that it has seen, and what it makes of the last one."""

from __future__ import annotations

from typing import Any, Protocol

from dflop_jax.contract import Array, Module, Params


class Memory(Protocol):
    """What layers of one kind keep of their rows' tokens so far, so that one more token of each row
    runs alone: keys and values, a window of them, a recurrent state.

    A layer mixes its tokens in one call of one function (its attention), and its memory knows that
    call's arguments: `*args, **options` below.
    """

    @property
    def axes(self) -> Any:
        """The tree that one layer keeps, a tuple of logical axis names (or None) per array;
        "rows" is one."""
        ...

    def prefill(self, last: Array, slots: int, *args: Any, **options: Any) -> tuple[Array, Any]:
        """Mix the tokens of whole prompts, one per row, as in training.

        Args:
          last: int32 [rows], index of each prompt's last token; what follows it is padding, of
            segment 0, that nothing may be kept of.
          slots: tokens that a row may come to, its prompt among them.

        Returns:
          what the layer's own function returns, and what it keeps.
        """
        ...

    def decode_token(
        self, cache: Any, layer: Array, place: Array, *args: Any, **options: Any
    ) -> tuple[Array, Any]:
        """Mix one more token of each row, [rows, 1, ...], with those before it.

        Args:
          cache: of all layers of this kind, stacked.
          layer: int32 scalar, which of them this is.
          place: int32 [rows], the token's place in its row.

        Returns:
          the same as `prefill`, with the cache of all layers, that of this one brought up to date.
          A row's token may be run again at its place, as long as none follows.
        """
        ...

    def grow(self, cache: Any, slots: int) -> Any:
        """The cache with room for rows of `slots` tokens, more than it had."""
        ...


class GeneratingModule(Module, Protocol):
    """An LLM that also answers (`dflop generate`); training needs none of this.

    Its `layer` takes, by name, `mix`: the function that mixes its tokens in the place of its own,
    called once and as its own is.
    """

    def memory(self, kind: str) -> Memory:
        """What layers of a kind keep."""
        ...

    def logits(self, params: Params, x: Array, entry: Params) -> Array:
        """Float32 [rows, tokens, vocab] of hidden states, by the parameters of its exit, and of its
        entry where it is tied."""
        ...
