"""The loss of a global batch: each module's sum over its denominator, weighted and added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflop_jax.contract import MultimodalModel

WEIGHTS = "weights"  # the field that a module with a loss reads


def modules_with_loss(model: MultimodalModel) -> tuple[str, ...]:
    """Names of the modules that end in a loss, in topological order."""
    return tuple(
        name
        for name, module in model.modules.items()
        if any(WEIGHTS in names for names in module.inputs.values())
    )


@dataclass(frozen=True)
class BatchLoss:
    """How the losses of a global batch are scaled.

    Attributes:
      denominators: by module with a loss, the sum of its token weights over the whole batch.
      factors: by the same, what its mean is multiplied by in the sum of all losses.
      supervised_tokens: those of the last of them that have a weight above 0.
    """

    denominators: dict[str, float]
    factors: dict[str, float]
    supervised_tokens: int = 0

    @classmethod
    def of(
        cls, model: MultimodalModel, denominators: Mapping[str, float], supervised_tokens: int = 0
    ) -> BatchLoss:
        factors = {m: float(getattr(model.modules[m], "loss_weight", 1.0)) for m in denominators}
        return cls(dict(denominators), factors, supervised_tokens)

    @property
    def scales(self) -> dict[str, float]:
        """What every token's loss of a module is multiplied by; any where no token has a weight."""
        return {m: self.factors[m] / (n or 1.0) for m, n in self.denominators.items()}

    @property
    def is_supervised(self) -> bool:
        """Whether some token has a weight above 0."""
        return any(self.denominators.values())

    def means(self, sums: Mapping[str, float], name: str = "loss_sum") -> dict[str, float]:
        """A sum of the batch (`StepResult.sums`), by module, over its denominator."""
        return {m: sums.get(f"{m}.{name}", 0.0) / (n or 1.0) for m, n in self.denominators.items()}

    def total(self, sums: Mapping[str, float]) -> float:
        """The loss that is trained on."""
        return sum(self.factors[m] * mean for m, mean in self.means(sums).items())
