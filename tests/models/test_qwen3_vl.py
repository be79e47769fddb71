"""Qwen3-VL against transformers: packed rows of pictures, clips and text on one device, a training
step over pipeline segments, generation, and folders read and written."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hf_reference import gradients, parameters, randomise, torch, transformers
from qwen3_vl_cases import CONTENTS, MODEL, SCHEDULE, SHAPES, SIZE, plan
from qwen3_vl_samples import IMAGE, VIDEO, make_sample
from safetensors.numpy import load_file

from dflop_jax.data.packing import pack_group
from dflop_jax.generate.decoding import decode, inlets_of, prefill
from dflop_jax.generate.mesh import answer_mesh, param_structs
from dflop_jax.generate.programs import AnswerPrograms
from dflop_jax.generate.row import row_of, with_features
from dflop_jax.generate.row import rows_of as samples_in_rows
from dflop_jax.generate.sampling import Sampling
from dflop_jax.pipeline.executor import Executor
from dflop_jax.pipeline.programs import GroupArrays
from dflop_jax.records import Schedule
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_folder
from models import qwen3_vl
from models.hf_sizes import folder_size
from tests.pipeline import plain
from tests.processes import run_processes
from tests.rows import group_of_rows, rows_of


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(samples, model of transformers with its gradients, logits of every sample, loss, folder)."""
    kind = {"model_type": "qwen3_vl", **MODEL.weights.config}
    config = transformers.AutoConfig.for_model(**kind)
    config.image_token_id, config.video_token_id = IMAGE, VIDEO
    assert MODEL.weights.mismatches(json.loads(config.to_json_string())) == []
    model = randomise(transformers.Qwen3VLForConditionalGeneration(config), 3)
    rng = np.random.default_rng(4)
    made = [make_sample(rng, SIZE, content) for content in CONTENTS]
    loss, logits = torch.zeros(()), []
    for m in made:
        out = model(**m.arguments).logits[0]
        logits.append(out.detach().numpy())
        llm = m.sample.fields["llm"]
        targets = torch.from_numpy(llm["targets"].astype(np.int64))
        losses = torch.nn.functional.cross_entropy(out, targets, reduction="none")
        loss = loss + (losses * torch.from_numpy(llm["weights"])).sum()
    loss.backward()
    folder = tmp_path_factory.mktemp("qwen3_vl") / "theirs"
    model.save_pretrained(folder)
    return [m.sample for m in made], model, logits, loss.item(), folder


def packed(samples):
    loads = [s.load for s in samples]
    groups = range(len(SCHEDULE.groups))
    return [pack_group(plan().layout, SCHEDULE, g, samples, loads, model=MODEL) for g in groups]


def test_text_without_positions_counts_alike_in_time_row_and_column():
    made = make_sample(np.random.default_rng(0), SIZE, (("text", 7),)).sample
    llm = made.fields["llm"]
    bare = {k: a for k, a in llm.items() if k != "positions"}
    sample = replace(made, fields={"llm": bare})
    schedule = Schedule(0, (group_of_rows("llm", SHAPES["llm"], ((((0,), ()),),)),))
    found = pack_group(plan().layout, schedule, 0, [sample], [sample.load], model=MODEL)
    np.testing.assert_array_equal(found.fields["positions"][0, 0, :7], llm["positions"])
    assert llm["positions"].tolist() == [[i] * 3 for i in range(7)]


def whole(params, seen, read, index):
    """Logits of the LLM's rows: every layer of both modules in turn, on one device."""
    vision, llm = (MODEL.modules[m] for m in ("vision", "llm"))
    layers = {
        m: [jax.tree.map(lambda a, i=i: a[i], params[m]["layers"]) for i in range(n)]
        for m, n in (("vision", vision.n_layers), ("llm", llm.n_layers))
    }

    def placed(features):
        flat = features.reshape(-1, features.shape[-1])
        return jnp.where(index >= 0, jnp.take(flat, jnp.maximum(index[..., 0], 0), axis=0), 0.0)

    x, taps = vision.entry(params["vision"]["entry"], seen), {}
    for i, p in enumerate(layers["vision"]):
        x = vision.layer(p, x, seen)
        for name in (name for name, n in vision.taps.items() if n == i + 1):
            taps[name] = placed(vision.tap(name, params["vision"][name], x, seen))
    visual = placed(vision.exit(params["vision"]["exit"], x, seen))
    x = llm.entry(params["llm"]["entry"], {**read, "visual": visual})
    for i, p in enumerate(layers["llm"]):
        x = llm.layer(p, x, read)
        for name in (name for name, n in llm.inlets.items() if n == i + 1):
            x = llm.inlet(name, x, taps[name], read)
    return llm.logits(params["llm"]["exit"], x, params["llm"]["entry"])


def test_packed_rows_give_the_logits_of_samples_alone(reference):
    samples, model, want, _, _ = reference
    params = parameters(MODEL.weights, model)
    arrays = packed(samples)
    run, worst = jax.jit(whole), 0.0
    for v, g in ((0, 1), (2, 3)):
        (index,) = arrays[g].places[v]
        fields = ({k: a[0] for k, a in arrays[i].fields.items()} for i in (v, g))
        found = np.asarray(run(params, *fields, index[0]))
        for row, members in enumerate(rows_of(SCHEDULE.groups[g], 1)[0][0]):
            start = 0
            for s in members:
                stop = start + len(want[s])
                error = np.abs(found[row, start:stop] - want[s]).max()
                assert error <= 1e-5, f"sample {s}: {error}"
                worst, start = max(worst, error), stop
    print(f"logits {worst:.1e}")


@pytest.mark.slow
def test_pipeline_step_and_folders(reference, tmp_path):
    """Two ways of a tensor split everywhere, a head tied across segments: every gradient is the
    reference's; what was read from its folder is written back bit by bit."""
    samples, model, _, want_loss, folder = reference
    arrays = [GroupArrays(p.fields, p.places) for p in packed(samples)]
    source = Folder(folder, MODEL.weights)
    source.check()
    ex = Executor(MODEL, plan(), optax.sgd(1.0), clip_norm=0.0)
    try:
        readers = {
            e.name: s.name
            for s in ex.plan.layout.segments
            for e in ex.plan.layout.edges
            if s.reads(e)
        }
        assert readers == {"visual": "llm0", "deepstack_0": "llm0", "deepstack_1": "llm1"}
        ex.init(0, begin=lambda segment, _: read_segment(source, segment))
        held = [
            ModuleParams(s.plan.module, ex.state.params[s.name], s.held_rows)
            for s in ex.programs.segments.values()
        ]
        write_folder(tmp_path / "ours", MODEL.weights, held, source=source)
        start = plain.join(ex.plan, ex.state.params)
        ex.compile()
        result = ex.run_step(SCHEDULE, arrays, {"llm": 1.0}).result()
        after = plain.join(ex.plan, ex.state.params)
    finally:
        ex.close()
    theirs, ours = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "ours"))
    assert theirs.keys() == ours.keys()
    assert all(a.tobytes() == ours[name].tobytes() for name, a in theirs.items())

    assert result.sums["llm.loss_sum"] == pytest.approx(want_loss, rel=1e-5)
    want = gradients(MODEL.weights, model)
    found = jax.tree.map(lambda a, b: a.astype(np.float64) - b, start, after)
    worst = 0.0
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(found), strict=True
    ):
        where = jax.tree_util.keystr(path)
        largest = np.abs(w).max()
        assert largest > 0, where
        error = np.abs(g - w).max() / largest
        assert error <= 1e-4, f"{where}: {error}"
        worst = max(worst, error)
    print(f"gradients {worst:.1e}")


@pytest.mark.slow
def test_two_processes_compute_the_reference_s_gradients(reference, tmp_path, monkeypatch):
    """Features, taps and the tied head's gradient cross from one process to the other."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
    samples, model, _, want_loss, folder = reference
    fields = {
        f"{g} {name}": a for g, p in enumerate(packed(samples)) for name, a in p.fields.items()
    }
    places = {
        f"{g} {source} {k}": a
        for g, p in enumerate(packed(samples))
        for source, arrays in p.places.items()
        for k, a in enumerate(arrays)
    }
    np.savez(tmp_path / "fields.npz", **fields)
    np.savez(tmp_path / "places.npz", **places)
    want = jax.tree_util.tree_leaves_with_path(gradients(MODEL.weights, model))
    np.savez(tmp_path / "want.npz", **{jax.tree_util.keystr(path): w for path, w in want})
    outputs = run_processes("tests.models.qwen3_vl_main", 2, 1, [str(folder), str(tmp_path)])
    lines = [line for o in outputs for line in o.splitlines()]
    in_both = [path for path, _ in want if str(path[:2]).count("llm") and "layers" in str(path[:2])]
    compared = sum(int(x[9:]) for x in lines if x.startswith("compared "))
    assert compared == len(want) + len(in_both) > len(want)
    loss = sum(float(x[5:]) for x in lines if x.startswith("loss "))
    assert loss == pytest.approx(want_loss, rel=1e-5)


def test_answers_go_on_where_the_row_ends(reference):
    """A prompt that ends with a picture: what follows it takes fewer positions than tokens."""
    samples, model, want, _, _ = reference
    params, llm = parameters(MODEL.weights, model), MODEL.modules["llm"]
    row, said = row_of([samples[2]], MODEL, 32), 2
    tokens, n = row.fields["tokens"][0], int(row.lengths[0]) - said
    fields = {**row.fields, "segment_ids": (np.arange(len(tokens)) < n).astype(np.int32)[None]}

    @jax.jit
    def run(params, fields, media, places):
        batch = with_features(MODEL, "cpu", params, fields, media, places)
        last = jnp.array([n - 1])
        return prefill(llm, params["llm"], batch, last, len(tokens), inlets_of(MODEL))

    logits, cache = run(params, fields, row.media, row.places)
    np.testing.assert_allclose(logits[0], want[2][n - 1], rtol=0, atol=1e-5)
    go_on = jax.jit(partial(decode, llm))
    for at in range(n, n + said):
        logits, cache = go_on(params["llm"], cache, jnp.array([tokens[at]]), jnp.array([at]))
        np.testing.assert_allclose(logits[0], want[2][at], rtol=0, atol=1e-5)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("ranks, tp, penalty", [(1, 1, 1.0), (2, 2, 1.0), (2, 1, 1.5)])
def test_a_batch_gives_the_tokens_of_transformers(reference, ranks, tp, penalty):
    """Text, pictures and a clip in one batch, over data ranks and with a split model."""
    model, n, here = reference[1], 12, {}
    rng = np.random.default_rng(4)
    made = [make_sample(rng, SIZE, content) for content in CONTENTS]
    theirs = []
    for m in made:
        given = {"max_new_tokens": n, "do_sample": False, "repetition_penalty": penalty}
        out = model.generate(**m.arguments, **given, eos_token_id=None, pad_token_id=0)
        theirs.append(out[0, -n:].tolist())
    mesh = answer_mesh(jax.devices(), tp, ranks)
    assert mesh.shape == {"data": ranks, "model": tp}
    params = parameters(MODEL.weights, model)
    for m, module in MODEL.modules.items():
        put = jax.tree.map(lambda s, a: jax.device_put(a, s.sharding),
                           param_structs(module, mesh), params[m])  # fmt: skip
        here[m] = put
    rows = samples_in_rows([m.sample for m in made], MODEL, ranks, 4 // ranks, 128)
    how = Sampling(n, repetition_penalty=penalty)
    programs = AnswerPrograms(MODEL, mesh)
    found = np.stack([*programs.tokens(here, rows, np.arange(4, dtype=np.uint32), how)])
    at = [k % ranks * (4 // ranks) + k // ranks for k in range(4)]
    assert found[:, at].T.tolist() == theirs
    assert len({token for said in theirs for token in said}) > 8  # else any cache would do
    if tp > 1:
        kept = here["llm"]["layers"]["key"]["kernel"]
        assert kept.addressable_shards[0].data.size * tp == kept.size


def test_a_published_configuration_is_the_named_size(tmp_path):
    """In the form that it was published in: an older spelling, the tower by the whole's name."""
    text = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 8, "intermediate_size": 12288, "head_dim": 128}
    rotary = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    vision = {"model_type": "qwen3_vl", "out_hidden_size": 4096, "num_heads": 16, "depth": 27}
    config = {
        "model_type": "qwen3_vl",
        "text_config": text | {"rope_theta": 5000000, "rope_scaling": rotary},
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert qwen3_vl.build(str(tmp_path)) == qwen3_vl.build("qwen3-vl-8b")
    assert qwen3_vl.build("qwen3-vl-8b").weights.mismatches(config) == []
    found = qwen3_vl.build("qwen3-vl-4b").weights.mismatches(config)
    assert ("text_config.hidden_size", 4096, 2560) in found


GOOD = {
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "vision_config": {"model_type": "qwen3_vl", "out_hidden_size": 64},
}


@pytest.mark.parametrize(
    "where, key, value, message",
    [
        ("text_config", "rope_scaling", {"mrope_section": [24, 20, 19]}, "mrope_section"),
        ("text_config", "rope_scaling", {"mrope_section": [0, 32, 32]}, "a third"),
        ("text_config", "rope_scaling", {"mrope_section": "24"}, "list of whole numbers"),
        ("text_config", "head_dim", 64, "sum 32"),
        ("vision_config", "deepstack_visual_indexes", [8, 8, 24], "must rise"),
        ("vision_config", "deepstack_visual_indexes", [8, 16, 27], "0 to 26"),
        ("vision_config", "out_hidden_size", 32, "must be equal"),
        ("vision_config", "num_position_embeddings", 2305, "no square"),
    ],
)
def test_bad_configurations_are_named(where, key, value, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD))
    assert folder_size(str(tmp_path), "qwen3_vl").vision.deepstack == (8, 16, 24)
    file.write_text(json.dumps(GOOD | {where: GOOD[where] | {key: value}}))
    with pytest.raises(ValueError, match=message) as error:
        folder_size(str(tmp_path), "qwen3_vl")
    assert "\n" not in str(error.value)
