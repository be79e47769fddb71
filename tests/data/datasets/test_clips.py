"""Clips as samples: patches and pixels go there and back, times and noise follow the epoch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflop_jax.config import DataConfig
from dflop_jax.data import Loader
from dflop_jax.data.datasets import clips
from dflop_jax.data.datasets.clip_lists import draw_clips, frames_to_latents, latents_to_frames
from dflop_jax.data.datasets.clips import ClipFormat, clip_format_of
from dflop_jax.data.decoder import decode
from models import llava, wan
from models.wan_layers import CLIP, TEXT, TIME_TOKENS

NANO, TINY = wan.build("nano+wan-nano"), wan.build("tiny-short+wan-tiny")


def test_patches_and_pixels_go_there_and_back():
    form, rng = ClipFormat(5, (2, 1, 3), 5.0, 7, 8, 9), np.random.default_rng(0)
    latents = rng.normal(size=(5, 4, 2, 6)).astype(np.float32)
    patches = form.patches(latents)
    assert patches.shape == (2 * 2 * 2, 2 * 1 * 3 * 5)
    np.testing.assert_array_equal(form.latents(patches, form.grid(latents.shape)), latents)
    t, r, c = 1, 1, 0
    block = latents[:, 2 * t : 2 * t + 2, r : r + 1, 3 * c : 3 * c + 3]
    np.testing.assert_array_equal(patches[(t * 2 + r) * 2 + c], np.moveaxis(block, 0, -1).ravel())
    np.testing.assert_array_equal(form.fields(2, (2, 2, 2))["positions"][9 + 6], [t, r, c])
    frames = rng.integers(0, 256, (3, 8, 12, 3)).astype(np.uint8)
    latents = frames_to_latents(frames, 4)
    assert latents.shape == (48, 3, 2, 3)
    np.testing.assert_array_equal(latents_to_frames(latents, 4), frames)


def scenes(split="train", **changed):
    return clips.make_clip_source(DataConfig(n_samples=6, **changed), TINY, split)


def generator_fields(source, index):
    return source.sample(index).fields["generator"]


def test_a_sample_is_the_flow_between_its_clip_and_noise():
    sample = scenes().sample(2)
    fields = sample.fields["generator"]
    clip = fields["role"] == CLIP
    s = fields["time"][0] / 1000
    clean = clip_format_of(TINY).patches(draw_clips("", 6, 0, "train", 48)[2].read())
    noise = fields["target"][clip] + clean
    np.testing.assert_allclose(fields["latents"][clip], (1 - s) * clean + s * noise, atol=1e-5)
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert 0 < s < 1
    assert (fields["time"] == fields["time"][0]).all()
    assert fields["weights"].sum() == clip.sum() == len(clean)
    assert not fields["latents"][~clip].any()
    np.testing.assert_array_equal(fields["role"][:TIME_TOKENS], np.arange(1, TIME_TOKENS + 1))
    heard, is_text = sample.gathers["llm", "generator"].index[:, 0], fields["role"] == TEXT
    np.testing.assert_array_equal(heard[is_text], np.arange(sample.load.tokens("llm")))
    assert (heard[~is_text] == -1).all()


def test_times_and_noise_follow_clip_and_epoch_alone():
    a, b = scenes(), scenes()
    for index in (4, 4 + 6 * 3):
        same = generator_fields(b, index)
        for name, value in generator_fields(a, index).items():
            np.testing.assert_array_equal(value, same[name])
    assert a.load(4) == a.load(4 + 6) == a.sample(10).load
    drawn = [generator_fields(*of) for of in [
        (a, 4), (a, 10), (a, 5), (scenes("eval"), 4), (scenes(seed=1), 4)]]  # fmt: skip
    assert len({float(fields["time"][0]) for fields in drawn}) == 5
    assert not np.array_equal(drawn[0]["target"], drawn[1]["target"])


def test_the_loader_counts_epochs_of_a_source_that_varies():
    loader = Loader(scenes(), global_batch=4)
    indices = [i for step in range(3) for i in loader.indices(step)]
    assert [i // 6 for i in indices] == [0] * 6 + [1] * 6
    assert sorted(i % 6 for i in indices[6:]) == list(range(6))


def test_held_out_pairs_are_not_trained_on_and_shuffled_captions_are_others():
    train, held_out = ([c.caption for c in draw_clips("", 300, 0, split, 48)]
                       for split in ("train", "eval"))  # fmt: skip
    assert len({*train}) > 200
    assert not {*train} & {*held_out}
    shuffled = clips.make_shuffled(DataConfig(n_samples=6), TINY, "train")
    captions, plain = ([bytes(s.sample(i).fields["llm"]["tokens"]) for i in range(6)]
                       for s in (shuffled, scenes()))  # fmt: skip
    assert captions == plain[3:] + plain[:3]
    target = generator_fields(shuffled, 1)["target"][-5:]
    np.testing.assert_array_equal(target, generator_fields(scenes(), 1)["target"][-5:])


def listed(tmp_path, records, **changed):
    (tmp_path / "list.json").write_text(json.dumps(records))
    config = DataConfig(path=str(tmp_path / "list.json"), **changed)
    return clips.make_clip_source(config, NANO, "train")


@pytest.fixture
def latents(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 2, 4, 6)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    save_file({"latents": values, "other": values[:1]}, tmp_path / "b.safetensors")
    np.save(tmp_path / "flat.npy", values[0])
    np.save(tmp_path / "words.npy", values.astype(np.int32))
    return values


def test_latents_are_read_from_both_kinds_of_files(tmp_path, latents):
    records = [{"caption": "one", "latents": name} for name in ("a.npy", "b.safetensors")]
    source = listed(tmp_path, records)
    for i in range(2):
        sample = source.sample(i)
        fields = sample.fields["generator"]
        clip, s = fields["role"] == CLIP, fields["time"][0] / 1000
        clean = fields["latents"][clip] - s * fields["target"][clip]
        np.testing.assert_allclose(clean, clip_format_of(NANO).patches(latents), atol=1e-5)
        assert sample.load.pieces == {"llm": (4,), "generator": (7 + 4 + 2 * 2 * 3,)}


@pytest.mark.parametrize(
    "record, says",
    [
        ({"latents": "a.npy"}, r'list.json\[0\]: no "caption"; say what the clip shows'),
        ({"caption": " ", "latents": "a.npy"}, r'list.json\[0\]: no "caption"'),
        ({"caption": "x"}, r'list.json\[0\]: no "latents"; name the .npy'),
        ({"caption": "x", "latents": "gone.npy"}, r"list.json\[0\].*missing file .*gone.npy"),
        ({"caption": "x", "latents": "../../a.npy"}, r"list.json\[0\].*is outside"),
        ({"caption": "x", "latents": "flat.npy"}, r"\[0\]: latents of shape \[2, 4, 6\], the mod"),
        ({"caption": "x", "latents": "words.npy"}, r"\[0\].*holds int32; save the latents as"),
        ({"caption": "x", "latents": "list.json"}, r"list.json\[0\]"),
        ({"caption": "x", "latents": "a.npy", "split": "test"}, 'no clip has "split": "train"'),
    ],
)
def test_a_record_that_cannot_be_used_is_named_in_one_line(tmp_path, latents, record, says):
    with pytest.raises(ValueError, match=says) as error:
        listed(tmp_path, [record])
    assert "\n" not in str(error.value)


def test_long_captions_are_cut_or_refused_and_a_changed_file_is_bad(tmp_path, latents):
    record = {"caption": "x" * 50, "latents": "a.npy"}
    assert listed(tmp_path, [record], max_tokens=16).load(0).tokens("llm") == 16
    with pytest.raises(ValueError, match="51 tokens exceed"):
        listed(tmp_path, [record], max_tokens=16, oversize="error")
    source = listed(tmp_path, [{"caption": "x", "latents": "a.npy"}])
    for values, why in [(latents[:, :1], "shape"), (latents * np.float32(np.nan), "not finite")]:
        np.save(tmp_path / "a.npy", values)
        assert "list.json[0]" in (reason := decode(source, 0).reason)
        assert why in reason


def test_what_is_no_list_and_models_that_make_no_clips_are_refused(tmp_path):
    (tmp_path / "list.json").write_text("{")
    for path, model, why in [
        (tmp_path / "list.json", NANO, "list.json.*data.path names a JSON list of clips"),
        (tmp_path / "gone.json", NANO, "names a JSON list of clips"),
        ("", NANO, "have 3 \\* k"),
        ("", llava.build("nano"), "generates no clips"),
    ]:
        with pytest.raises(ValueError, match=why):
            clips.make_clip_source(DataConfig(path=str(path)), model, "train")
