"""Clips as samples: patches and pixels go there and back, times and noise follow the epoch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflop_jax.config import DataConfig
from dflop_jax.data import Loader
from dflop_jax.data.datasets import clips
from dflop_jax.data.datasets.clips import ClipFormat, clip_format_of
from dflop_jax.data.datasets.moving_scenes import MovingScenes, frames_of, latents_of
from dflop_jax.data.decoder import BadSample, decode
from models import wan
from models.wan_layers import CLIP, TEXT, TIME_TOKENS

NANO, TINY = wan.build("nano+wan-nano"), wan.build("tiny-short+wan-tiny")
GENERATOR = ("llm", "generator")


def test_patches_are_latents_in_order_of_time_row_column_channel():
    form = ClipFormat(5, (2, 1, 3), 5.0, 7, 8, 9)
    latents = np.random.default_rng(0).normal(size=(5, 4, 2, 6)).astype(np.float32)
    patches = form.patches(latents)
    assert patches.shape == (2 * 2 * 2, 2 * 1 * 3 * 5)
    np.testing.assert_array_equal(form.latents(patches, form.grid(latents.shape)), latents)
    t, r, c = 1, 1, 0
    block = latents[:, 2 * t : 2 * t + 2, r : r + 1, 3 * c : 3 * c + 3]
    np.testing.assert_array_equal(patches[(t * 2 + r) * 2 + c], np.moveaxis(block, 0, -1).ravel())
    np.testing.assert_array_equal(form.fields(2, (2, 2, 2))["positions"][9 + 6], [t, r, c])


def test_pixels_come_back_from_latents():
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 12, 3)).astype(np.uint8)
    latents = latents_of(frames, 4)
    assert latents.shape == (48, 3, 2, 3)
    np.testing.assert_array_equal(frames_of(latents, 4), frames)


def scenes(split="train", **changed):
    return clips.make_clip_source(DataConfig(n_samples=6, **changed), TINY, split)


def test_a_sample_is_the_flow_between_its_clip_and_noise():
    source = scenes()
    sample = source.sample(2)
    fields = sample.fields["generator"]
    clip = fields["role"] == CLIP
    s = fields["time"][0] / 1000
    clean = clip_format_of(TINY).patches(MovingScenes(6, 0, "train", 48).latents(2))
    noise = fields["target"][clip] + clean
    np.testing.assert_allclose(fields["latents"][clip], (1 - s) * clean + s * noise, atol=1e-5)
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05
    assert 0 < s < 1
    assert (fields["time"] == fields["time"][0]).all()
    assert fields["weights"].sum() == clip.sum() == len(clean)
    assert not fields["latents"][~clip].any()
    np.testing.assert_array_equal(fields["role"][:TIME_TOKENS], np.arange(1, TIME_TOKENS + 1))
    heard = sample.gathers[GENERATOR].index[:, 0]
    np.testing.assert_array_equal(
        heard[fields["role"] == TEXT], np.arange(sample.load.tokens("llm"))
    )
    assert (heard[fields["role"] != TEXT] == -1).all()


def test_times_and_noise_follow_clip_and_epoch_alone():
    a, b = scenes(), scenes()
    for epoch in (0, 3):
        one, same = a.sample(4 + 6 * epoch), b.sample(4 + 6 * epoch)
        for name, value in one.fields["generator"].items():
            np.testing.assert_array_equal(value, same.fields["generator"][name])
    first, later = (a.sample(4 + 6 * k).fields["generator"] for k in (0, 1))
    other = a.sample(5).fields["generator"]
    assert first["time"][0] != later["time"][0] != other["time"][0]
    assert not np.array_equal(first["target"], later["target"])
    assert a.load(4) == a.load(4 + 6) == a.sample(10).load
    held_out = scenes("eval").sample(4).fields["generator"]
    assert held_out["time"][0] != first["time"][0]
    assert scenes(seed=1).sample(4).fields["generator"]["time"][0] != first["time"][0]


def test_the_loader_counts_epochs_of_a_source_that_varies():
    source = scenes()
    loader = Loader(source, global_batch=4)
    indices = [i for step in range(3) for i in loader.indices(step)]
    assert [i // 6 for i in indices] == [0] * 6 + [1] * 6
    assert sorted(i % 6 for i in indices[6:]) == list(range(6))
    assert Loader(source, global_batch=4).indices(2) == indices[8:]


def test_held_out_pairs_are_not_trained_on_and_shuffled_captions_are_others():
    train, held_out = (MovingScenes(300, 0, split, 48) for split in ("train", "eval"))
    seen = {train.caption(i) for i in range(300)}
    assert len(seen) > 200
    assert not seen & {held_out.caption(i) for i in range(300)}
    shuffled = MovingScenes(300, 0, "train", 48, shuffled=True)
    assert sorted(shuffled.caption(i) for i in range(300)) == sorted(map(train.caption, range(300)))
    assert sum(shuffled.caption(i) == train.caption(i) for i in range(300)) < 10
    np.testing.assert_array_equal(shuffled.frames(7), train.frames(7))


# ---- files ----


def listed(tmp_path, records, **changed):
    (tmp_path / "list.json").write_text(json.dumps(records))
    return clips.make_clip_source(
        DataConfig(path=str(tmp_path / "list.json"), **changed), NANO, "train"
    )


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
        ({"caption": "x", "latents": "../../a.npy"}, r"list.json\[0\].*leads out of"),
        (
            {"caption": "x", "latents": "flat.npy"},
            r"\[0\]: latents of shape \[2, 4, 6\], the model",
        ),
        ({"caption": "x", "latents": "words.npy"}, r"\[0\].*holds int32; save the latents as"),
        ({"caption": "x", "latents": "list.json"}, r"list.json\[0\]"),
        ({"caption": "x", "latents": "a.npy", "split": "test"}, 'no clip has "split": "train"'),
    ],
)
def test_a_record_that_cannot_be_used_is_named_in_one_line(tmp_path, latents, record, says):
    with pytest.raises(ValueError, match=says) as error:
        listed(tmp_path, [record])
    assert "\n" not in str(error.value)


def test_long_captions_are_cut_or_refused(tmp_path, latents):
    record = {"caption": "x" * 50, "latents": "a.npy"}
    assert listed(tmp_path, [record], max_tokens=16).load(0).tokens("llm") == 16
    with pytest.raises(ValueError, match="51 tokens exceed"):
        listed(tmp_path, [record], max_tokens=16, oversize="error")


def test_a_file_that_changed_is_a_bad_sample(tmp_path, latents):
    source = listed(tmp_path, [{"caption": "x", "latents": "a.npy"}])
    np.save(tmp_path / "a.npy", latents[:, :1])
    bad = decode(source, 0)
    assert isinstance(bad, BadSample)
    assert "list.json[0]" in bad.reason
    np.save(tmp_path / "a.npy", latents * np.float32(np.nan))
    assert "not finite" in decode(source, 0).reason


def test_what_is_no_list_and_models_that_make_no_clips_are_refused(tmp_path):
    from models import llava

    (tmp_path / "list.json").write_text("{")
    with pytest.raises(ValueError, match=r"list.json.*data.path names a JSON list of clips"):
        clips.make_clip_source(DataConfig(path=str(tmp_path / "list.json")), NANO, "train")
    with pytest.raises(ValueError, match="names a JSON list of clips"):
        clips.make_clip_source(DataConfig(path=str(tmp_path / "gone.json")), NANO, "train")
    with pytest.raises(ValueError, match="have 3 k k channels"):
        clips.make_clip_source(DataConfig(), NANO, "train")
    with pytest.raises(ValueError, match="generates no clips"):
        clips.make_clip_source(DataConfig(), llava.build("nano"), "train")
    with pytest.raises(ValueError, match="captions are shuffled"):
        clips.make_shuffled(DataConfig(path="x.json"), TINY, "train")
