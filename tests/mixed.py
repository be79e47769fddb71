"""The model of `small`, with an LLM whose layers are of two kinds, in any order."""

from __future__ import annotations

from dataclasses import dataclass

import jax

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


@dataclass(frozen=True)
class Mixed(Small):
    """The model."""

    pattern: str = "mmgmmg"

    @property
    def modules(self):
        text = MixedText(len(self.pattern), self.tied, self.pattern)
        return {"vision": Eye(2), "llm": text}
