"""What is measured, by whom, and under which name it is kept; never how long it took."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.profile import measure
from dflop_jax.profile.measure import model_profile, profile_key
from dflop_jax.profile.timed_programs import TimedPrograms
from dflop_jax.profile.timing_jobs import time_layers, timing_jobs
from dflop_jax.records import Edge, Shape
from dflop_jax.runtime.synthetic_batch import content_of_rows
from tests.small import WIDTH, Small

MODEL = Small()
SHAPES = {"vision": [Shape(2, 16)], "llm": [Shape(1, 32)]}


def timed(model, shapes, devices):
    return time_layers(model, timing_jobs(model, shapes, [[tuple(devices)]]))


def test_timings_and_the_models_facts_make_a_profile():
    devices = jax.devices()[:1]
    timings = timed(MODEL, SHAPES, devices)
    assert [t.module for t in timings] == ["vision", "llm"]
    profile = model_profile(MODEL, SHAPES, timings, devices, key="k")
    assert {(t.module, t.shape) for t in profile.timings} == {(m, s[0]) for m, s in SHAPES.items()}
    assert all(t.layer_forward_s + t.ends_forward_s > 0 for t in profile.timings)
    # Forward may seem to take as long as both directions of so small a module on a busy machine.
    assert any(t.layer_backward_s + t.ends_backward_s > 0 for t in profile.timings)
    for t in profile.timings:
        again = [t.recompute[r].layer_s for r in ("none", "dots", "named", "layers")]
        assert again[0] == 0.0 <= again[1] <= again[2] <= again[3] <= t.layer_forward_s
        kept = [t.recompute[r].layer_bytes for r in ("layers", "named", "dots", "none")]
        assert kept == sorted(kept)
        assert kept[0] == pytest.approx(t.hidden_bytes)
    # The model's own facts go with it.
    assert profile.edges == (Edge("vision", "llm", "visual"),)
    assert profile.tied == ("llm",)
    assert profile.piece_tokens == {"vision": 16}
    assert profile.n_layers == {"vision": 2, "llm": 4}
    # Hidden states of a segment, float32, and no pairs where attention takes whole rows.
    hidden = {t.module: t.hidden_bytes for t in profile.timings}
    assert hidden == {"vision": 2 * 16 * WIDTH * 4, "llm": 32 * WIDTH * 4}
    assert all(t.content_forward_s == t.content_backward_s == {} for t in profile.timings)


@pytest.mark.parametrize("took_s, n_runs", [((0.01, 0.02), 25), ((0.04, 0.01), 13), ((3, 2), 3)])
def test_programs_are_timed_in_turns_for_a_bounded_time(took_s, n_runs):
    """A clock played by hand; one run in the middle is disturbed."""
    now, calls = [0.0], []

    def run(i):
        calls.append(i)
        now[0] += took_s[i] * (10 if len(calls) == 5 else 1)

    got = measure.median_seconds([lambda: run(0), lambda: run(1)], clock=lambda: now[0])
    assert got == pytest.approx(took_s)
    assert calls == [0, 1] * (len(calls) // 2)
    assert len(calls) // 2 - 1 == n_runs  # one to warm up


class Taps(dict):
    """Taps by name that a frozen dataclass can hold."""

    def __hash__(self):
        return hash(tuple(sorted(self.items())))


@dataclass(frozen=True)
class Plain:
    """A module of two matrices a layer, whose rows hold pieces; `taps` as the contract has them."""

    n_layers: int = 4
    pair_flops: float = 0.0
    taps: Taps = field(default_factory=Taps)
    loss: bool = False
    width: int = 8

    tied = False

    @property
    def skips(self):
        return self.pair_flops > 0

    @property
    def attention_flops(self):
        return {"pair": self.pair_flops}

    @property
    def inputs(self):
        taps = dict.fromkeys(self.taps, ())
        return {"entry": ("ids",), "layers": ("segment_ids", "positions"), "exit": (), **taps}

    @property
    def freeze_groups(self):
        return dict.fromkeys(self.inputs, "all")

    def field_spec(self, name, rows, tokens):
        if name == "deep":
            return jax.ShapeDtypeStruct((rows, tokens, self.width), jnp.float32)
        return jax.ShapeDtypeStruct((rows, tokens), jnp.int32)

    def init(self, part, key):
        w = jax.random.normal(key, (16 if part == "entry" else self.width, self.width))
        return {"up": w, "down": w.T} if part == "layers" else {"w": w}

    def logical_axes(self, part):
        layer = {"up": (None, "mlp"), "down": ("mlp", None)}
        return layer if part == "layers" else {"w": (None, None)}

    def entry(self, params, batch):
        return jnp.take(params["w"], batch["ids"], axis=0, mode="clip")

    def layer(self, params, x, batch):
        first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        return x + (x @ params["up"]) @ params["down"] * first[..., None].astype(x.dtype)

    def exit(self, params, x, batch, entry):
        y = x @ params["w"]
        return {"loss_sum": jnp.sum(y)} if self.loss else y

    def tap(self, name, params, x, batch):
        return x @ params["w"]

    def inlet(self, name, x, placed, batch):
        return x + placed


def two(**fields):
    """Module `a` feeds `b` from a tap after its third layer, between `b`'s layers 2 and 3."""
    a, b = Plain(taps=Taps(mid=3), **fields), Plain(loss=True, **fields)
    edges = [{"source": "a", "target": "b", "name": "deep", "tap": "mid", "enters": 3}]
    return SimpleNamespace(modules={"a": a, "b": b}, edges=edges, piece_tokens={}, vocab_size=16)


def test_content_seconds_are_split_by_feature():
    """A layer of 2 s, 1e-2 s a pair and 0.5 s a piece of a made-up feature; of another there is
    nothing in any filling, so that it costs for its FLOPs what these two do."""
    module = SimpleNamespace(
        content=lambda n, placed: {"none": 0, "piece": int(n > 0), "pair": n * n}
    )
    contents = [content_of_rows(module, Shape(3, 48), n) for n in (1, 16, 5)]
    assert contents[2] == {"none": 0, "piece": 15, "pair": 3 * (4 * 10**2 + 8**2)}
    seconds = [2 + 1e-2 * c["pair"] + 0.5 * c["piece"] for c in contents]
    flops = {"pair": 2.0, "none": 4.0, "piece": 8.0}
    static_s, content_s = measure._split_content(seconds, contents, flops)
    assert static_s == pytest.approx(2.0, rel=1e-4)
    want = {"pair": 1e-2, "none": 4 * 0.51 / 10, "piece": 0.5}
    assert content_s == pytest.approx(want, rel=1e-4)
    alone = measure._split_content([2 + 0.5 * 3 * n for n in (1, 16)], contents[:2], {"piece": 8.0})
    assert alone == (pytest.approx(2.0), {"piece": pytest.approx(0.5)})
    assert measure._split_content([2.0], contents[:1], {}) == (2.0, {})


def test_pair_seconds_come_from_two_piece_counts(monkeypatch):
    """A clock played by hand: a layer of 2 s and 3 s, 1e-2 s and 3e-2 s a pair, ends of 7 s."""
    calls = []

    def fakes(segments, shape, below, pieces):
        return [fake(segment, shape, pieces) for segment in segments]

    def fake(segment, shape, pieces):
        runs = []
        for n in pieces:
            pairs = content_of_rows(segment.module, shape, n)["pair"]
            depth = segment.plan.n_layers
            runs.append((7 + depth * (2 + 1e-2 * pairs), 7 + depth * (3 + 3e-2 * pairs)))
        calls.append(tuple(pieces))
        n = segment.plan.n_layers
        return TimedPrograms(tuple(runs), 10.0 * n + 5, 8.0 * n + 1, 64.0, segment.name == "a")

    monkeypatch.setattr(measure, "compile_timed_programs", fakes)
    monkeypatch.setattr(measure, "median_seconds", lambda runs, max_runs: runs)
    shapes = {m: [Shape(2, 48)] for m in "ab"}
    for t in timed(two(pair_flops=4.0), shapes, jax.devices()[:1]):
        # The backward program of "b", which nobody reads, also runs forward.
        own = (3.0, 3e-2, 7.0) if t.module == "a" else (1.0, 2e-2, 0.0)
        assert (t.layer_forward_s, t.content_forward_s["pair"], t.ends_forward_s) == pytest.approx(
            (2.0, 1e-2, 7.0)
        )
        got = (t.layer_backward_s, t.content_backward_s["pair"], t.ends_backward_s)
        assert got == pytest.approx(own, abs=1e-9)
        assert (t.recompute["none"].temp_bytes, t.hidden_bytes) == (5.0, 64.0)
        # What forward hands over, or the temporaries of a backward that runs forward.
        assert t.recompute["none"].layer_bytes == (8.0 if t.module == "a" else 10.0)
    assert set(calls) == {(1, 16)}
    calls.clear()
    timings = timed(two(), shapes, jax.devices()[:1])
    assert all(t.content_forward_s == t.content_backward_s == {} for t in timings)
    assert {len(pieces) for pieces in calls} == {1}  # whole rows are timed once


def test_profile_key_depends_on_programs_and_shapes():
    devices, shapes = jax.devices()[:1], {m: [Shape(1, 32)] for m in "ab"}
    key = profile_key(two(), devices, shapes, "more")
    assert key == profile_key(two(), devices, shapes, "more")
    wider = profile_key(two(width=16), devices, shapes, "more")
    longer = profile_key(two(), devices, {**shapes, "b": [Shape(1, 64)]}, "more")
    assert len({key, wider, longer, profile_key(two(), devices, shapes)}) == 4
