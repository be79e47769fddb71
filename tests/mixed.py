"""The model of `small`, with an LLM whose layers are of two kinds, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tests.small import WIDTH, Eye, Small, Stack, Text, before

KINDS = {"m": "mean", "g": "gate"}
UNITS = 20  # of a gated layer


@dataclass(frozen=True)
class MixedText(Text):
    """Layers of `small`, and gated ones, as `pattern` says: "mmg" are two of the former and one of
    the latter."""

    pattern: str = "mmg"

    inputs = {
        "entry": ("tokens", "is_visual", "visual"),
        "mean": ("segment_ids",),
        "gate": ("segment_ids",),
        "exit": ("targets", "weights"),
    }
    freeze_groups = {**dict.fromkeys(inputs, "llm"), "gate": "gates"}

    @property
    def layer_kinds(self):
        return tuple(KINDS[c] for c in self.pattern)

    @property
    def shapes(self):
        mean = super().shapes["layers"]
        gate = {
            "gate": ((WIDTH, UNITS), ("embed", "mlp")),
            "value": ((WIDTH, UNITS), ("embed", "mlp")),
            "out": ((UNITS, WIDTH), ("mlp", "embed")),
        }
        return {"entry": self.entry_shapes, "mean": mean, "gate": gate, "exit": self.exit_shapes}

    def layer(self, params, x, batch, kind):
        if kind == "mean":
            return Stack.layer(self, params, x, batch)
        opened = jax.nn.sigmoid(x @ params["gate"])
        seen = before(x, batch["segment_ids"]) @ params["value"]
        return x + (opened * seen) @ params["out"]


MADE = 3  # numbers of a token


@dataclass(frozen=True)
class HandingText(MixedText):
    """Hands on, beside hidden states, what the layer of kind "mean" before made for gated ones, as
    models do whose layers read an earlier one's keys; at first what the entry made."""

    def entry(self, params, batch):
        x = super().entry(params, batch)
        return {"made": jnp.sin(x)[..., None, :MADE], "states": x}

    def layer(self, params, x, batch, kind):
        made, states = x["made"], x["states"]
        if kind == "gate":
            room = ((0, 0), (0, 0), (0, WIDTH - MADE))
            states = states + jnp.pad(before(made[:, :, 0], batch["segment_ids"]), room)
        after = super().layer(params, states, batch, kind)
        if kind == "mean":
            made = jnp.tanh(after)[..., None, -MADE:]
        return {"made": made, "states": after}

    def exit(self, params, x, batch, entry):
        return super().exit(params, x["states"] * (1 + x["made"].sum(-1)), batch, entry)


@dataclass(frozen=True)
class Mixed(Small):
    """The model."""

    pattern: str = "mmgmmg"
    text: type[MixedText] = MixedText

    @property
    def modules(self):
        text = self.text(len(self.pattern), self.tied, self.pattern)
        return {"vision": Eye(2), "llm": text}
