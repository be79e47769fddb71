"""Native resolution against Qwen3-VL's published processors: sizes, patches, times, tokens and
positions, and every sample as large as its header says."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.media.kind import IMAGE
from dflop_jax.data.media.native import Native
from dflop_jax.data.media.pictures import picture_size, read_picture
from dflop_jax.data.media.video import ClipHeader, read_numbered
from tests.data.media.test_video import write_long
from tests.data.media_cases import (
    clip_of,
    made_pictures,
    noise,
    picture_header,
    shared_files,
    talk,
    with_columns,
    write_clip,
)
from tests.data.text.test_chat import write
from tests.verify.folders import load

SIZES = [(1, 1), (1, 200), (200, 1), (33, 31), (56, 2000), (1200, 900), (16, 16), (4000, 3000),
         (48, 48), (80, 112), (9000, 50), (255, 257), (6000, 5000), (2048, 8192)]  # fmt: skip
SPEC = MediaSpec.of({"vision": {"form": "native", "patch_px": 16, "merge": 2, "frames": 2}}, {})
LIMITS = {"min_pixels": 1024, "max_pixels": 40_000, "max_clip_pixels": 60_000, "max_frames": 6}
# media of a message in the published tokens, each where it stands
QWEN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}
{{- '<|vision_start|><|' + c.type + '_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>"]  # fmt: skip


@pytest.fixture(scope="module")
def published():
    """The published code, by part: pictures, clips, text, model."""
    pictures = load("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    model = load("transformers.models.qwen3_vl.modeling_qwen3_vl")
    text = load("transformers.models.qwen3_vl.processing_qwen3_vl")
    # its class can only be imported where torchvision is
    file = Path(model.__file__).parent / "video_processing_qwen3_vl.py"
    spec = spec_from_file_location("transformers.models.qwen3_vl.clips", file)
    clips = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(clips)
    yield SimpleNamespace(pictures=pictures, clips=clips, text=text, model=model)
    del sys.modules[spec.name]


@pytest.mark.parametrize("low, high", [(65_536, 16_777_216), (1024, 50_000), (200_000, 200_000)])
def test_sizes_are_the_published_ones(published, low, high):
    rng = np.random.default_rng(0)
    sizes = [*SIZES, *np.exp(rng.uniform(0, 9, (400, 2))).astype(int).tolist()]
    native = Native(min_pixels=low, max_pixels=high)
    widths, heights = np.array(sizes).T
    rows_of, cols_of = native.blocks(with_columns(IMAGE, width=widths, height=heights))
    for k, (width, height) in enumerate(sizes):
        try:
            rows, cols = published.pictures.smart_resize(height, width, 32, low, high)
        except ValueError:
            assert not rows_of[k]
            continue
        assert (rows_of[k], cols_of[k]) == (rows // 32, cols // 32)
        assert native.grid(picture_header(width, height)) == (rows // 16, cols // 16)


def test_limits_are_those_of_the_published_configuration(published):
    of, native = published.clips.Qwen3VLVideoProcessor, Native()
    assert (native.patch_px, native.merge) == (of.patch_size, of.merge_size)
    assert (native.frames, native.frames_per_s) == (of.temporal_patch_size, of.fps)
    assert (native.min_frames, native.max_frames) == (of.min_frames, of.max_frames)
    # its preprocessor_config.json and video_preprocessor_config.json
    assert (native.min_clip_pixels, native.max_clip_pixels) == (4096, 25_165_824)
    assert (native.min_pixels, native.max_pixels) == (65_536, 16_777_216)


@pytest.mark.parametrize(
    "of_clips",
    [{}, {"min_frames": 16}, {"min_clip_pixels": 131_072}, {"num_frames": 9},
     {"cap_pixels_per_frame": True, "max_video_tokens": 16},
     {"cap_pixels_per_frame": True, "min_clip_pixels": 65_536}],
)  # fmt: skip
def test_clips_are_seen_as_published(published, of_clips):
    rng = np.random.default_rng(0)
    plain = Native(max_frames=30, **of_clips)
    own = SimpleNamespace(
        fps=None if plain.num_frames else 2, min_frames=plain.min_frames, max_frames=30,
        video_processor=None,
    )  # fmt: skip
    for _ in range(300):
        total, width, height = np.exp(rng.uniform(0, [9, 8, 8])).astype(int).tolist()
        num, den = [(30, 1), (30000, 1001), (3, 1), (60, 1), (12, 5)][rng.integers(5)]
        low, most = plain.min_clip_pixels, int(rng.integers(140_000, 5_000_000))
        native = replace(plain, max_clip_pixels=most)
        layout = native.clip(ClipHeader(width, height, total, num, den))
        facts = SimpleNamespace(total_num_frames=total, fps=num / den)
        sampled = published.clips.Qwen3VLVideoProcessor.sample_frames(
            own, facts, num_frames=plain.num_frames or None
        )
        frames = sampled.tolist()
        if plain.cap_pixels_per_frame:  # as in `resize`, which needs torchvision
            cap = min(plain.max_video_tokens * 32**2, most // len(frames))
            most = max(cap, int(low * 1.05)) * len(frames)
        try:
            rows, cols = published.clips.smart_resize(len(frames), height, width, 2, 32, low, most)
        except ValueError:
            assert layout is None
            continue
        assert layout.grid == (rows // 16, cols // 16)
        assert layout.frames == tuple(frames + frames[-1:] * (len(frames) % 2))
        times = published.text.Qwen3VLProcessor._calculate_timestamps(own, frames, num / den)
        assert layout.seconds == tuple(times)


def test_a_clip_s_patches_are_the_published_ones(published, tmp_path):
    """Of every clip that is there. torchvision, which resizes there, calls `interpolate`, whose
    weights have 16 bits; Pillow's have 22, so that a value in some hundreds rounds the other way.
    """
    torch = pytest.importorskip("torch")
    native = Native(max_clip_pixels=100_000, max_frames=4)
    patchify = published.clips.Qwen3VLVideoProcessor.patchify
    for path in [write_long(tmp_path / "a.mp4", "mpeg4", frames=9), *shared_files("videos")]:
        layout = native.clip(clip_of(path))
        stored = read_numbered(path, layout.frames, np.asarray)
        frames = np.stack([native.resized(Image.fromarray(f), layout.grid) for f in stored])
        theirs = torch.nn.functional.interpolate(
            torch.tensor(stored.transpose(0, 3, 1, 2)), frames.shape[1:3], mode="bicubic",
            antialias=True,
        )  # fmt: skip
        patches, *grid = patchify(None, theirs[None], 16, 2, 2)
        assert grid == [len(layout.seconds), *layout.grid]
        off = np.abs(native.patches(frames).astype(int) - patches[0].numpy())
        assert off.max() <= 2
        assert (off > 0).mean() < 0.005


def dataset(folder, records, **options):
    (folder / "dataset.json").write_text(json.dumps(records))
    config = DataConfig(path=str(folder), max_tokens=4096, **LIMITS, **options)
    return make_source(config, SPEC, index_dir=folder / "index", vocab_size=512, in_processes=False)


def mixed(folder):
    """Records of one picture, several, a clip, and text alone; then of shared media."""
    names = [p.name for p in made_pictures(folder) if p.name != "thin.png"]
    write_clip(folder / "a.mp4", 9)
    shared = [p.name for p in shared_files("images")[::4]]
    fives = [shared[k : k + 5] for k in range(0, len(shared), 5)]
    return [
        {"image": names[1:2], "conversations": talk("<image>\nWhat?", "Two <b>.")},
        {"image": names[2:6],
         "conversations": talk("<image> and <image>", "a", "<image>or<image>?", "b")},
        {"video": "a.mp4", "conversations": talk("Look:<video>\nMoves?", "Yes.")},
        {"video": "a.mp4", "image": names[:1],
         "conversations": talk("<image><video>", "First.", "And?", "Then.")},
        {"conversations": talk("Hello there.", "assistant")},
        *({"image": five, "conversations": talk("<image>" * len(five), "Some.")} for five in fives),
        *({"video": p.name, "conversations": talk("Look: <video>", "It moves.")}
          for p in shared_files("videos")[:4]),
    ]  # fmt: skip


class Published:
    """The published processor and model's positions, without a video processor."""

    def __init__(self, code):
        self.of, self.of_model = code.text.Qwen3VLProcessor, code.model.Qwen3VLModel
        self.own, sizes = Native(**LIMITS), SimpleNamespace(merge_size=2, temporal_patch_size=2)
        self.processor = SimpleNamespace(
            vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>",
            image_token="<|image_pad|>", video_token="<|video_pad|>",
            image_processor=sizes, video_processor=sizes,
            _calculate_timestamps=lambda *a: self.of._calculate_timestamps(self.processor, *a),
        )  # fmt: skip
        vision = SimpleNamespace(spatial_merge_size=2)
        self.model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        places = self.of_model.get_vision_position_ids
        self.model.get_vision_position_ids = lambda *a, **k: places(self.model, *a, **k)

    def render(self, record, found):
        """(text, grids of pictures, grids of clips), media in their tokens."""
        import torch

        text, images, videos = "", [], []
        for turn in record["conversations"]:
            role = {"human": "user", "gpt": "assistant"}[turn["from"]]
            text += f"<|im_start|>{role}\n{turn['value']}<|im_end|>\n"
        for name in record.get("image", []):
            images.append([1, *self.own.grid(picture_header(*picture_size(found(name))))])
            seen = {"image_grid_thw": torch.tensor(images)}
            pads = self.of.replace_image_token(self.processor, seen, len(images) - 1)
            text = text.replace("<image>", f"<|vision_start|>{pads}<|vision_end|>", 1)
        if "video" in record:
            facts = clip_of(found(record["video"]))
            layout = self.own.clip(facts)
            videos.append([len(layout.seconds), *layout.grid])
            fps, frames = facts.rate_num / facts.rate_den, list(layout.frames)
            metadata = [SimpleNamespace(fps=fps, frames_indices=frames)]
            seen = {"video_grid_thw": torch.tensor(videos), "video_metadata": metadata}
            pads = self.of.replace_video_token(self.processor, seen, 0)
            text = text.replace("<video>", f"<|vision_start|>{pads}<|vision_end|>", 1)
        return text, images, videos

    def positions(self, ids, kinds, images, videos):
        import torch

        places, _ = self.of_model.get_rope_index(
            self.model, torch.tensor(ids)[None], torch.tensor(kinds)[None],
            torch.tensor(images) if images else None, torch.tensor(videos) if videos else None,
        )  # fmt: skip
        return places[:, 0].T.numpy()


def test_samples_are_the_published_ones(published, tmp_path):
    """Token ids, positions and patches; small, since the resizing is the same at any size. (Patches
    of clips: see above.)"""
    pytest.importorskip("torch")
    folder = write(tmp_path / "t", QWEN, special=SPECIAL)
    records = mixed(tmp_path)
    roots = {f.parent for kind in ("images", "videos") for f in shared_files(kind)} | {tmp_path}
    source = dataset(tmp_path, records, tokenizer=str(folder), root=tuple(sorted(map(str, roots))))
    assert len(source) == len(records)
    pictures = published.pictures.Qwen2VLImageProcessorPil(
        patch_size=16, size={"shortest_edge": 1024, "longest_edge": 40_000},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    theirs = Published(published)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|image_pad|>", "<|video_pad|>", "<|endoftext|>")
    image, video, pad = (tokenizer.token_to_id(name) for name in names)

    def found(name):
        return next(root / name for root in roots if (root / name).exists())

    for i, record in enumerate(records):
        text, images, videos = theirs.render(record, found)
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
        kinds = np.select([ids == image, ids == video], [1, 2])
        fields = source.sample(i).fields
        if images and not videos:
            shown = [read_picture(found(n)) for n in record["image"]]
            expected = pictures(shown, return_tensors="np")["pixel_values"]
            ours = fields["vision"]["patches"] / 127.5 - 1
            np.testing.assert_allclose(ours, expected, atol=1e-6)
        np.testing.assert_array_equal(fields["llm"]["tokens"], np.where(kinds > 0, pad, ids))
        positions = theirs.positions(ids, kinds, images, videos)
        np.testing.assert_array_equal(fields["llm"]["positions"], positions)


def test_what_cannot_be_seen_is_left_out_and_named(tmp_path, caplog):
    Image.fromarray(noise(1, 10_000)).save(tmp_path / "thin.png")
    write_clip(tmp_path / "one.mp4", 1)
    records = mixed(tmp_path)[:1]
    records += [
        {"id": "thin", "image": "thin.png", "conversations": talk("<image>?", "a")},
        {"id": "one", "video": "one.mp4", "conversations": talk("<video>?", "a")},
    ]
    with caplog.at_level(logging.WARNING, "dflop_jax.data"):
        source = dataset(tmp_path, records)
    assert (len(source), source.counts["left out"]) == (1, 2)
    (line,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert "2 records left out: the model cannot take their media" in line
    assert all(f"dataset.json[{k}]" in line for k in (1, 2))
    with pytest.raises(ValueError, match=r"min_pixels=9000 is not between .*max_pixels=8000"):
        Native(min_pixels=9000, max_pixels=8000)
