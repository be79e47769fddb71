"""Pictures with weighted sources, sound and text in one step: equal to each sample run alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflop_jax.data import MediaSpec, Sample, pack_group
from dflop_jax.data.media.token_sources import TokenSources
from dflop_jax.pipeline.exchange import gather_features
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.programs import GroupArrays
from dflop_jax.records import Bucket, Microbatch, Plan, Schedule, SegmentPlan, SubmeshPlan
from models import llava, omni, qwen2_audio

from . import plain
from .test_gradients import KEY_BIAS, assert_trees_close

N = 7


jax.tree_util.register_dataclass(TokenSources)


@functools.cache
def model(kind):
    if kind == "audio":
        return qwen2_audio.build("qwen2-audio-nano")
    if kind == "anyres":
        return llava.build("anyres-nano")
    size = omni.build("omni-nano").size
    vision = dataclasses.replace(size.vision, merge=1)
    return omni.Omni(
        dataclasses.replace(size, vision=vision, layout="anyres"), jnp.dtype("float32")
    )


@functools.cache
def samples(kind):
    """Sample 0 is text, 1 pictures only, 2 sound only, the others mixed."""
    m, rng = model(kind), np.random.default_rng(5)
    spec = MediaSpec.of(m.preprocessing)
    out = []
    for i in range(N):
        # Few combinations, so that the oracle compiles few shapes.
        n, w = ((0, 0), (2, 0), (0, 1))[i] if i < 3 else ((2, 1), (0, 1), (2, 1), (2, 0))[i % 4]
        n, w = (n if spec.tile_px else 0), (w if spec.sound else 0)
        text, seen, lines = 8, 5 * n, n
        heard = max(0, w * spec.features_per_item("audio") - 1) if w else 0
        t = text + seen + lines + heard
        weight = np.zeros((t, 4), np.float32)
        weight[2 : 2 + seen] = rng.dirichlet(np.ones(4), seen)
        index = rng.integers(0, max(1, n * spec.tokens_per_tile), (t, 4)).astype(np.int32)
        newline = np.zeros(t, bool)
        newline[2 + seen : 2 + seen + lines] = True
        audio = np.full(t, -1, np.int32)
        audio[t - 4 - heard : t - 4] = np.arange(heard)
        media = newline | weight.any(1) | (audio >= 0)
        one = Sample(
            tokens=np.where(media, 0, rng.integers(0, m.vocab_size, t)).astype(np.int32),
            supervised=~media & (np.arange(t) >= t - 5),
            tiles=rng.integers(
                0, 256, (n, max(spec.tile_px, 1), max(spec.tile_px, 1), 3), np.uint8
            ),
            visual=TokenSources(index, weight, newline),
        )
        if w:
            fields = spec.no_items("audio", int(w))
            one = dataclasses.replace(
                one,
                mel=rng.normal(size=fields["mel"].shape).astype(np.float32),
                mel_frames=rng.integers(9, fields["mel"].shape[-1] + 1, w).astype(np.int32),
                audio=audio,
            )
        out.append(one)
    return out


@functools.cache
def oracle(kind):
    """(parameters, loss, gradients), every sample alone and unpadded on one device."""
    m = model(kind)
    ex = Executor(m, make_plan(m, dict.fromkeys(m.modules, (0, 1, 1, 1))), optax.sgd(1.0))
    ex.init(0)
    params = plain.join(ex.plan, ex.state.params)
    ex.close()

    @jax.jit
    def value_and_grad(params, arrays):
        return jax.value_and_grad(loss_sum)(params, Sample(**arrays))

    def loss_sum(params, s):
        t = len(s.tokens)
        visual = jnp.zeros((t, m.size.decoder.width))
        if len(s.tiles):
            out = plain.run_module(m.modules["vision"], params["vision"], s.items("vision"))
            flat = out.reshape(-1, out.shape[-1])
            visual += (flat[s.visual.index] * s.visual.weight[..., None]).sum(1)
        if len(s.mel):
            out = plain.run_module(m.modules["audio"], params["audio"], s.items("audio"))
            flat = out.reshape(-1, out.shape[-1])
            visual += jnp.where((s.audio >= 0)[:, None], flat[jnp.maximum(s.audio, 0)], 0.0)
        fields = {
            "tokens": s.tokens,
            "segment_ids": np.ones(t, np.int32),
            "positions": np.arange(t, dtype=np.int32),
            "targets": jnp.append(s.tokens[1:], np.int32(0)),
            "weights": jnp.append(s.supervised[1:], False).astype(np.float32),
            "is_visual": (s.visual.weight > 0).any(1) | (s.audio >= 0 if len(s.audio) else False),
            "is_newline": s.visual.newline,
        }
        batch = {k: jnp.asarray(v)[None] for k, v in fields.items()} | {"visual": visual[None]}
        return plain.run_module(m.modules["llm"], params["llm"], batch)["loss_sum"]

    count = sum(int(s.supervised[1:].sum()) for s in samples(kind))
    loss, grads = 0.0, jax.tree.map(lambda a: np.zeros(a.shape, np.float64), params)
    for s in samples(kind):
        value, gradient = value_and_grad(params, vars(s))
        loss += float(value) / count
        grads = jax.tree.map(lambda a, g: a + np.asarray(g, np.float64) / count, grads, gradient)
    return params, loss, grads


def make_plan(m, meshes, group_size=1):
    submeshes = tuple(SubmeshPlan(n, *meshes[n]) for n in m.modules)
    segments = tuple(
        SegmentPlan(n, n, 0, spec.n_layers, n, True, True) for n, spec in m.modules.items()
    )
    encoders = m.modules.keys() - {"llm"}
    has = [8 if e in encoders else 0 for e in ("vision", "audio")]
    buckets = [Bucket(v, 96, 2, a) for v in {has[0], 0} for a in {has[1], 0}]
    return Plan("test", submeshes, segments, tuple(buckets), group_size=group_size)


def schedule_of(plan, kind):
    """Text, pictures alone and sound alone each in a group that lacks the others' encoders, where
    the plan has such a bucket; the rest in two groups with everything."""
    shapes = [s.shape for s in samples(kind)]
    ranks, g = plan.data_ranks("llm"), plan.group_size

    def bucket_for(indices):
        wants = [sum(getattr(shapes[i], f) for i in indices) > 0 for f in ("tiles", "windows")]
        return next(b for b, x in enumerate(plan.buckets) if [x.tiles > 0, x.windows > 0] == wants)

    def group(indices):
        b, bins = bucket_for(indices), g * ranks * 2
        rows = iter(tuple(indices[k::bins]) for k in range(bins))
        return tuple(
            Microbatch(b, tuple(tuple(next(rows) for _ in range(2)) for _ in range(ranks)))
            for _ in range(g)
        )

    return Schedule(0, (group([0]), group([1]), group([2]), group([3, 4]), group([5, 6])))


CASES = {
    "omni apart": ("omni", {"vision": (0, 1, 2, 1), "audio": (2, 1, 1, 2), "llm": (4, 1, 2, 2)}, 1),
    "omni encoders together": (
        "omni",
        {"vision": (0, 1, 2, 1), "audio": (0, 1, 1, 2), "llm": (2, 2, 3, 1)},
        2,
    ),
    "anyres": ("anyres", {"vision": (0, 1, 2, 1), "llm": (2, 1, 3, 1)}, 1),
    "audio": ("audio", {"audio": (0, 1, 2, 1), "llm": (2, 1, 1, 2)}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_step_equals_every_sample_alone(name):
    kind, meshes, group_size = CASES[name]
    m, (params, want_loss, want) = model(kind), oracle(kind)
    plan = make_plan(m, meshes, group_size)
    every, spec = samples(kind), MediaSpec.of(m.preprocessing)
    groups = []
    for group in schedule_of(plan, kind).groups:
        packed = pack_group(
            group,
            plan.buckets[group[0].bucket],
            every,
            shapes=[s.shape for s in every],
            data_ranks={n: plan.data_ranks(n) for n in plan.modules},
            spec=spec,
        )
        groups.append(GroupArrays(group[0].bucket, packed.fields, packed.sources))
    count = sum(int(s.supervised[1:].sum()) for s in every)
    ex = Executor(m, plan, optax.sgd(1.0))
    try:
        ex.init(0)
        before = plain.join(plan, ex.state.params)
        assert_trees_close(before, params, 1e-6)
        ex.compile()
        result = ex.run_step(0, groups, 1.0 / count).result()
        after = plain.join(plan, ex.state.params)
    finally:
        ex.close()
    assert result.sums["loss_sum"] / count == pytest.approx(want_loss, rel=1e-5)
    grads = jax.tree.map(lambda a, b: a.astype(np.float64) - b, before, after)
    ran = {(e.segment, e.group) for e in result.trace.events if e.group >= 0}
    assert ran == {
        (s.name, g)
        for g, x in enumerate(groups)
        for s in plan.segments
        if plan.buckets[x.bucket].items(s.module)
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
    m, (params, _, _) = model("omni"), oracle("omni")
    bucket, group = Bucket(8, 96, 2, 8), (Microbatch(0, (((0, 3), (1, 4)), ((5, 2), (6,)))),)

    @jax.jit
    def hidden(fields, sources):
        visual = 0.0
        for name, arrays in sources.items():
            one = {k: a[0] for k, a in fields[name].items()}
            found = plain.run_module(m.modules[name], params[name], one)
            visual += gather_features(found[None], *arrays)
        llm, p = m.modules["llm"], params["llm"]
        batch = {k: a[0] for k, a in fields["llm"].items()} | {"visual": visual[0]}
        x = llm.entry(p["entry"], batch)
        return jax.lax.scan(lambda x, q: (llm.layer(q, x, batch), None), x, p["layers"])[0]

    def run(every):
        packed = pack_group(
            group, bucket, every, shapes=[s.shape for s in every],
            data_ranks={"vision": 2, "audio": 2, "llm": 2}, spec=MediaSpec.of(m.preprocessing),
        )  # fmt: skip
        segments = packed.fields["llm"]["segment_ids"][0]
        out = np.asarray(hidden(packed.fields, packed.sources))
        where = zip(group[0].rows[0] + group[0].rows[1], segments, out, strict=True)
        return {i: x[s == k] for row, s, x in where for k, i in enumerate(row, 1)}

    before = run(samples("omni"))
    assert before.keys() == set(range(N))
    for changed in (3, 4):  # of sound, and of tiles and sound
        every = list(samples("omni"))
        old = every[changed]
        every[changed] = dataclasses.replace(
            old, tokens=(old.tokens + 1) % m.vocab_size, tiles=255 - old.tiles, mel=-old.mel
        )
        after = run(every)
        for i, x in before.items():
            assert len(x) == len(samples("omni")[i].tokens)
            assert np.array_equal(x, after[i]) == (i != changed), i
