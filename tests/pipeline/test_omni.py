"""Pictures with weighted sources, sound and text in one step: equal to each sample run alone."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.contract import edges_of
from dflop_jax.data.features import features_per_row
from dflop_jax.data.packing import pack_group
from dflop_jax.data.sample import Places, Sample
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.gather import gather_features
from dflop_jax.pipeline.programs import GroupArrays
from dflop_jax.records import (
    Bucket,
    Edge,
    Layout,
    Load,
    Plan,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    first_pieces,
    numbered,
)
from models import omni
from models.composed import Composed
from tests.rows import group_of_rows

from . import plain
from .test_gradients import KEY_BIAS, assert_trees_close

N = 7


@functools.cache
def model():
    size = omni.build("omni-nano").size
    vision = dataclasses.replace(size.vision, merge=1)
    return Composed(dataclasses.replace(size, vision=vision, layout="anyres"), jnp.dtype("float32"))


@functools.cache
def samples():
    """Sample 0 is text, 1 pictures only, 2 sound only, the others mixed."""
    m, rng = model(), np.random.default_rng(5)
    out = []
    for i in range(N):
        # Few combinations, so that the oracle compiles few shapes.
        n, w = ((0, 0), (2, 0), (0, 1))[i] if i < 3 else ((2, 1), (0, 1), (2, 1), (2, 0))[i % 4]
        text, seen, lines = 8, 5 * n, n
        heard = w * features(m, "audio") - 1 if w else 0
        t = text + seen + lines + heard
        weight = np.zeros((t, 4), np.float32)
        weight[2 : 2 + seen] = rng.dirichlet(np.ones(4), seen)
        index = np.full((t, 4), -1, np.int32)
        index[2 : 2 + seen] = rng.integers(0, max(1, n * features(m, "vision")), (seen, 4))
        newline = np.zeros(t, bool)
        newline[2 + seen : 2 + seen + lines] = True
        audio = np.full(t, -1, np.int32)
        audio[t - 4 - heard : t - 4] = np.arange(heard)
        media = newline | weight.any(1) | (audio >= 0)
        tokens = np.where(media, 0, rng.integers(0, m.vocab_size, t)).astype(np.int32)
        fields = {
            "llm": {
                "tokens": tokens,
                "targets": np.append(tokens[1:], np.int32(0)),
                "weights": np.append((~media & (np.arange(t) >= t - 5))[1:], False).astype(
                    np.float32
                ),
                "is_visual": weight.any(1) | (audio >= 0),
                "is_newline": newline,
            }
        }
        places, pieces = {}, {"llm": (t,)}
        if n:
            shape = m.modules["vision"].field_spec("pixels", n, 1).shape
            fields["vision"] = {"pixels": rng.integers(0, 256, shape, np.uint8)}
            places["vision", "llm"] = Places(index, weight)
            pieces["vision"] = (m.piece_tokens["vision"],) * n
        if w:
            mel = m.modules["audio"].field_spec("mel", w, 1).shape
            fields["audio"] = {
                "mel": rng.normal(size=mel).astype(np.float32),
                "mel_frames": rng.integers(9, mel[-1] + 1, w).astype(np.int32),
            }
            places["audio", "llm"] = Places(audio[:, None])
            pieces["audio"] = (m.piece_tokens["audio"],) * w
        out.append(Sample(fields, places, Load(pieces)))
    return out


def features(m, module):
    """Features that an encoder gives for a tile or a window."""
    return features_per_row(
        m.modules[module], Edge(module, "llm", "visual"), Shape(1, m.piece_tokens[module])
    )


@functools.cache
def oracle():
    """(parameters, loss, gradients), every sample alone and unpadded on one device."""
    m = model()
    ex = Executor(m, make_plan(m, dict.fromkeys(m.modules, (0, 1, 1, 1))), optax.sgd(1.0))
    ex.init(0)
    params = plain.join(ex.plan, ex.state.params)
    ex.close()

    @jax.jit
    def value_and_grad(params, fields, places):
        return jax.value_and_grad(loss_sum)(params, fields, places)

    def loss_sum(params, fields, places):
        llm = fields["llm"]
        t = len(llm["tokens"])
        visual = jnp.zeros((t, m.size.decoder.width))
        for name, (index, weight) in places.items():
            out = plain.run_module(m.modules[name], params[name], fields[name])
            rows = out.reshape(-1, out.shape[-1])[jnp.maximum(index, 0)]
            visual += (rows * jnp.where(index >= 0, weight, 0.0)[..., None]).sum(1)
        batch = {k: jnp.asarray(v)[None] for k, v in llm.items()}
        batch |= {
            "segment_ids": np.ones((1, t), np.int32),
            "positions": np.arange(t, dtype=np.int32)[None],
            "visual": visual[None],
        }
        return plain.run_module(m.modules["llm"], params["llm"], batch)["loss_sum"]

    count = supervised()
    loss, grads = 0.0, jax.tree.map(lambda a: np.zeros(a.shape, np.float64), params)
    for s in samples():
        places = {
            source: (p.index, np.ones(p.index.shape, np.float32) if p.weight is None else p.weight)
            for (source, _), p in s.places.items()
        }
        value, gradient = value_and_grad(params, s.fields, places)
        loss += float(value) / count
        grads = jax.tree.map(lambda a, g: a + np.asarray(g, np.float64) / count, grads, gradient)
    return params, loss, grads


def supervised():
    return sum(float(s.fields["llm"]["weights"].sum()) for s in samples())


def make_plan(m, meshes, group_size=1):
    submeshes = tuple(SubmeshPlan(n, *meshes[n]) for n in m.modules)
    segments = tuple(
        SegmentPlan(n, n, 0, spec.n_layers, n, True, True) for n, spec in m.modules.items()
    )
    encoders = [n for n in m.modules if n != "llm"]
    buckets = [
        Bucket.of({
            **{n: Shape(8, m.piece_tokens[n]) if on else None for n, on in zip(encoders, which)},
            "llm": Shape(2, 96),
        })
        for which in itertools.product((True, False), repeat=len(encoders))
    ]  # fmt: skip
    tied = tuple(n for n, spec in m.modules.items() if spec.tied)
    return Plan(
        "test",
        Layout(
            submeshes, segments, tuple(buckets), edges=edges_of(m), group_size=group_size, tied=tied
        ),
    )


def schedule_of(plan):
    """Text, pictures alone and sound alone each in a group that the others' encoders do not feed;
    the rest in two groups that all feed."""
    loads = [s.load for s in samples()]
    ranks, g = plan.layout.data_ranks("llm"), plan.layout.group_size
    groups = []

    def add(indices):
        bins = g * ranks * 2
        rows = iter(tuple(indices[k::bins]) for k in range(bins))
        dealt = tuple(tuple(tuple(next(rows) for _ in range(2)) for _ in range(ranks))
                      for _ in range(g))  # fmt: skip
        producers = [m for m in plan.layout.modules if m != "llm"
                     and any(loads[i].lengths(m) for i in indices)]  # fmt: skip
        consumer = len(groups) + len(producers)
        for m in producers:
            first = first_pieces(loads, m)
            microbatches = []
            for microbatch in dealt:
                held = [i for rank in microbatch for row in rank for i in row]
                pieces = [p for i in held for p in range(first[i], first[i + 1])]
                n = plan.layout.data_ranks(m)
                microbatches.append(tuple(
                    tuple((p,) for p in pieces[r::n]) + ((),) * (8 - len(pieces[r::n]))
                    for r in range(n)))  # fmt: skip
            groups.append(
                group_of_rows(m, plan.layout.shapes(m)[0], tuple(microbatches), (consumer,))
            )
        groups.append(group_of_rows("llm", plan.layout.shapes("llm")[0], dealt))

    for indices in ([0], [1], [2], [3, 4], [5, 6]):
        add(indices)
    return Schedule(0, tuple(groups))


CASES = {
    "apart": ({"vision": (0, 1, 2, 1), "audio": (2, 1, 1, 2), "llm": (4, 1, 2, 2)}, 1),
    "encoders together": ({"vision": (0, 1, 2, 1), "audio": (0, 1, 1, 2), "llm": (2, 2, 3, 1)}, 2),
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", CASES)
def test_step_equals_every_sample_alone(name):
    meshes, group_size = CASES[name]
    m, (params, want_loss, want) = model(), oracle()
    plan = make_plan(m, meshes, group_size)
    every, schedule = samples(), schedule_of(plan)
    packed = [
        pack_group(plan.layout, schedule, g, every, [s.load for s in every], model=m)
        for g in range(len(schedule.groups))
    ]
    arrays = [GroupArrays(p.fields, p.places) for p in packed]
    count = supervised()
    ex = Executor(m, plan, optax.sgd(1.0))
    try:
        ex.init(0)
        before = plain.join(plan, ex.state.params)
        assert_trees_close(before, params, 1e-6)
        ex.compile()
        result = ex.run_step(schedule, arrays, {"llm": 1.0 / count}).result()
        after = plain.join(plan, ex.state.params)
    finally:
        ex.close()
    assert result.sums["llm.loss_sum"] / count == pytest.approx(want_loss, rel=1e-5)
    grads = jax.tree.map(lambda a, b: a.astype(np.float64) - b, before, after)
    ran = {(e.segment, e.group) for e in result.trace.events if e.group >= 0}
    assert ran == {
        (s.name, g)
        for g, group in enumerate(schedule.groups)
        for s in plan.layout.segments_of(group.module)
    }
    largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(grads), strict=True
    ):
        where = jax.tree_util.keystr(path)
        # The update is a difference of float32 parameters of order one.
        noise = 2e-7 * max(1.0, largest) if where != KEY_BIAS else 1e-6 * largest
        assert np.abs(g - w).max() <= 1e-5 * np.abs(w).max() + noise, where


def test_changing_one_sample_leaves_the_others_bit_identical():
    """Text, tiles and sound of one packed sample: what the LLM's last layer gives for the others,
    whose tiles the same program encodes and the same rows hold, does not change by a bit."""
    m, (params, _, _) = model(), oracle()
    meshes = {"vision": (0, 1, 2, 1), "audio": (0, 1, 2, 1), "llm": (2, 1, 2, 1)}
    plan, loads = make_plan(m, meshes), [s.load for s in samples()]
    rows = (((0, 3), (1, 4)), ((5, 2), (6,)))
    groups = []
    for name in ("vision", "audio"):
        n = len(numbered(loads, name))
        ranks = tuple(tuple((p,) for p in range(r, n, 2)) for r in range(2))
        groups.append(group_of_rows(name, Shape(8, m.piece_tokens[name]), (ranks,), (2,)))
    schedule = Schedule(0, (*groups, group_of_rows("llm", Shape(2, 96), (rows,))))

    @jax.jit
    def hidden(fields, places):
        visual = 0.0
        for name in ("vision", "audio"):
            one = {k: a[0] for k, a in fields[name].items()}
            out = plain.run_module(m.modules[name], params[name], one)
            visual += gather_features(out, *(a[0] for a in places[name]))
        llm, p = m.modules["llm"], params["llm"]
        batch = {k: a[0] for k, a in fields["llm"].items()} | {"visual": visual}
        x = llm.entry(p["entry"], batch)
        return jax.lax.scan(lambda x, q: (llm.layer(q, x, batch), None), x, p["layers"])[0]

    def run(every):
        packed = [pack_group(plan.layout, schedule, g, every, loads, model=m) for g in range(3)]
        fields = {g.module: p.fields for g, p in zip(schedule.groups, packed, strict=True)}
        places = {schedule.groups[g].module: a for g, a in packed[2].places.items()}
        segments = packed[2].fields["segment_ids"][0]
        out = np.asarray(hidden(fields, places))
        where = zip(rows[0] + rows[1], segments, out, strict=True)
        return {i: x[s == k] for row, s, x in where for k, i in enumerate(row, 1)}

    before = run(samples())
    assert before.keys() == set(range(N))
    for changed in (3, 4):  # of tiles, and of tiles and sound
        every = list(samples())
        fields = {m: dict(named) for m, named in every[changed].fields.items()}
        fields["llm"]["tokens"] = (fields["llm"]["tokens"] + 1) % m.vocab_size
        if "vision" in fields:
            fields["vision"]["pixels"] = 255 - fields["vision"]["pixels"]
        if "audio" in fields:
            fields["audio"]["mel"] = -fields["audio"]["mel"]
        every[changed] = dataclasses.replace(every[changed], fields=fields)
        after = run(every)
        for i, x in before.items():
            assert len(x) == len(samples()[i].fields["llm"]["tokens"])
            assert np.array_equal(x, after[i]) == (i != changed), i
