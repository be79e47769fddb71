"""What one sample may be at most under a plan, module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflop_jax.data import MediaSpec
from dflop_jax.data.build import preparation
from dflop_jax.data.largest import LoneMedium, growing
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.data.media.video import VIDEO
from dflop_jax.records import Bucket, Load, Plan
from dflop_jax.schedule.shapes.spare import beyond, holding_capacity
from dflop_jax.train.prepare import Workplace

TOGETHER = "all"


@dataclass(frozen=True)
class LargestMedium:
    """The largest picture, or the longest clip, that fits with all smaller ones.

    Attributes:
      picture: its sides in pixels, (0, 0): none fits.
      clip_s, clip_frames: of a clip, 0: none fits.
      unlimited: whether larger ones fit as well, since they are scaled down or sampled thinner.
    """

    picture: tuple[int, int] = (0, 0)
    clip_s: float = 0.0
    clip_frames: int = 0
    unlimited: bool = False


@dataclass(frozen=True)
class SampleRoom:
    """What a module, or all of them together, can take of one sample.

    Attributes:
      module: its name, or `TOGETHER`.
      tokens: in all its pieces; piece_tokens: in one of them. 0 of all together.
      picture, clip: each alone in a sample; None where the module has nothing of such.
    """

    module: str
    tokens: int
    piece_tokens: int
    picture: LargestMedium | None
    clip: LargestMedium | None


def sample_room(place: Workplace, plan: Plan) -> list[SampleRoom]:
    """Return what each module of a plan takes of one sample at most, then all together; media alone
    are counted, without the text around them."""
    spec = MediaSpec.of(place.model.preprocessing, place.model.piece_tokens)
    how = preparation(place.config.data, spec, place.model.vocab_size)
    shown, seen = growing(how, IMAGE), growing(how, VIDEO)
    ranks = holding_capacity(plan).ranks
    rooms = []
    for module in filter(plan.layout.shapes, plan.layout.modules):
        shapes = plan.layout.shapes(module)
        only = plan.with_layout(buckets=tuple(Bucket.of({module: s}) for s in shapes))
        tokens = max(s.size for s in shapes) * ranks[module], max(s.tokens for s in shapes)
        by_kind = [_of(module, p) for p in shown], [_of(module, c) for c in seen]
        rooms.append(SampleRoom(module, *tokens, *(_most(one, only) for one in by_kind)))
    return [*rooms, SampleRoom(TOGETHER, 0, 0, _most(shown, plan), _most(seen, plan))]


def _of(module: str, one: LoneMedium) -> LoneMedium:
    """What a medium asks of one module."""
    return replace(one, load=Load({module: one.load.lengths(module)}))


def _most(rising: Sequence[LoneMedium], plan: Plan) -> LargestMedium | None:
    """The last one up to which all fit; None where they ask for nothing."""
    if not any(any(one.load.pieces.values()) for one in rising):
        return None
    large = beyond([one.load for one in rising], plan)
    if large and large[0] == 0:
        return LargestMedium()
    fitting = [one.header for one in rising[: large[0] if large else len(rising)]]
    last = fitting[-1]
    if "total" not in last:  # of pictures as large as the last one the one nearest to a square
        same = [h for h in fitting if h["width"] * h["height"] == last["width"] * last["height"]]
        shape = min(same, key=lambda h: h["width"] + h["height"])
        return LargestMedium((shape["width"], shape["height"]), unlimited=not large)
    seconds = last["total"] * last["rate_den"] / last["rate_num"]
    return LargestMedium(clip_s=seconds, clip_frames=last["total"], unlimited=not large)
