"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass

# Largest errors that count as equal, as `Verified` has them: both sides compute in float32 and add
# in other orders.
LOGIT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# Where transformers' float32 is further than that from its own float64, we may be as many times as
# far from it: two ways of rounding the same.
SHARE_OF_ROUNDING = 3.0


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a part of a module, such as "llm.layers".

    Attributes:
      n_bytes: in the folder's files.
      identical: how many of them were written as they are there, bit by bit.
      max_grad_error: see `Verified`; None where gradients were not compared.
    """

    name: str
    tensors: int
    n_bytes: int
    identical: int
    max_grad_error: float | None = None


@dataclass(frozen=True)
class Verified:
    """What a folder's weights are worth here.

    Attributes:
      bit_identical: whether every tensor was written as it is in the folder.
      max_logit_error: largest difference to the logits of transformers in float32, as a share of
        the largest of these, of 1 at least; None: not compared. Where errors are too large so, they
        are those to transformers in float64.
      largest_logit: of transformers.
      max_grad_error: largest difference to a gradient of transformers, as a share of the largest
        entry of its tensor; None: not compared.
      rounding: of transformers' float32 to its float64, the same (logit, gradient) errors; None
        where float64 was not asked, or there is no memory for it.
      not_compared: why there are no errors; "" if there are.
    """

    folder: str
    model_type: str
    bit_identical: bool
    max_logit_error: float | None
    max_grad_error: float | None
    largest_logit: float | None
    not_compared: str
    groups: tuple[TensorGroup, ...]
    rounding: tuple[float, float] | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The largest (logit, gradient) errors that count as equal."""
        logit, gradient = self.rounding or (0.0, 0.0)
        return (
            max(LOGIT_TOLERANCE, SHARE_OF_ROUNDING * logit),
            max(GRADIENT_TOLERANCE, SHARE_OF_ROUNDING * gradient),
        )

    @property
    def exit_code(self) -> int:
        """0 if all that was compared is equal."""
        equal = self.bit_identical
        if self.max_logit_error is not None and self.max_grad_error is not None:
            logit, gradient = self.limits
            # Written so that an error that is no number counts as one.
            equal &= self.max_logit_error <= logit
            equal &= self.max_grad_error <= gradient
        return 0 if equal else 1
