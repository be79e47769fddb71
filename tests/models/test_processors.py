"""Processor files with other settings than published, against the published processors, whose
values are stored (`make_reference.py`); what cannot be honoured is refused by its name."""

from __future__ import annotations

import json

import numpy as np
import processor_cases as cases
import pytest
from reference_cases import FILE, project

from dflop_jax.data import MediaSpec
from dflop_jax.data.media.kind import IMAGE
from models.processors import AUDIO_DEFAULTS, IMAGE_DEFAULTS, VIDEO_DEFAULTS
from tests.verify.folders import load

# What no family honours, and a value that no published class has by itself.
REFUSED = {"do_resize": False, "resample": 0}
REFUSED_BY_KIND = {
    "qwen3_vl": {"merge_size": 4, "patch_size": 8, "temporal_patch_size": 1},
    "llava_onevision": {"do_pad": False, "size": {"height": 56, "width": 56}},
    "internvl": {"min_patches": 2, "size": {"height": 56, "width": 56}},
    "gemma3": {"size": {"height": 56, "width": 56}},
    "gemma4": {"patch_size": 8, "pooling_kernel_size": 4},
}
CLIP_SIZES = dict.fromkeys(("llava_onevision", "internvl"), cases.SQUARE)


@pytest.mark.parametrize("kind", cases.SETTINGS)
def test_pictures_are_those_of_the_published_processor(tmp_path, kind):
    """Tokens, and the numbers that the tower reads."""
    folder = cases.write_processors(tmp_path / kind, kind, cases.SETTINGS[kind])
    model, limits = cases.read_model(*folder)
    medium = MediaSpec.of(model.preprocessing, model.piece_tokens).prepared(limits)["vision"]
    processing = model.size.vision.processing
    name = "patches" if kind in ("qwen3_vl", "gemma4") else "pixels"
    with np.load(FILE) as stored:
        tokens, values = stored[f"processors/{kind}/tokens"], stored[f"processors/{kind}/values"]
    for picture, n_tokens, want in zip(cases.pictures(), tokens, values, strict=True):
        width, height = picture.size
        header = dict.fromkeys(IMAGE.columns, 0) | {"width": width, "height": height}
        columns = {k: np.array([v]) for k, v in header.items()}
        (counted,) = medium.count("image", columns, np.array([True])).tokens.tolist()
        decoded = medium.decode("image", lambda *_, p=picture: p, header, True)
        assert counted == len(decoded.ids)
        assert n_tokens in (-1, counted)
        ours = np.asarray(processing.normalize(decoded.fields[name], innermost=name == "pixels"))
        ours = ours if name == "patches" else np.moveaxis(ours, -1, -3)
        products, largest = project(ours.reshape(-1), kind)
        np.testing.assert_allclose([*products, largest], want, rtol=0, atol=2e-5 * ours.size**0.5)


@pytest.mark.parametrize("kind", cases.SETTINGS)
def test_what_is_not_honoured_is_refused_by_its_name(tmp_path, kind):
    settings = cases.SETTINGS[kind]
    for name, value in {**REFUSED, **REFUSED_BY_KIND[kind]}.items():
        folder = cases.write_processors(tmp_path / name, kind, settings | {name: value})
        with pytest.raises(
            ValueError, match=rf"preprocessor_config\.json: {name} .* not supported"
        ):
            cases.read_model(*folder)
    for clips, match in (
        ({**cases.COLOURS, "rescale_factor": 0.1}, "differ from those"),
        ({"do_resize": False}, "do_resize"),
    ):
        if kind in VIDEO_DEFAULTS:
            fits = {k: v for k, v in settings.items() if k != "size"} | CLIP_SIZES.get(kind, {})
            folder = cases.write_processors(tmp_path / match[:4], kind, settings, {**fits, **clips})
            with pytest.raises(ValueError, match=match):
                cases.read_model(*folder)


def test_sounds_that_the_encoder_cannot_take_are_refused(tmp_path):
    fits = {"feature_size": 16, "chunk_length": 4, "hop_length": 320, "n_fft": 512}
    for change, match in (
        ({}, ""), ({"chunk_length": 30}, "give 1500 frames, the encoder takes 200"),
        ({"dither": 0.1}, "dither"), ({"feature_size": 80}, "feature_size"),
    ):  # fmt: skip
        folder = cases.write_processors(tmp_path, "qwen2_audio", {**fits, **change})
        if match:
            with pytest.raises(ValueError, match=match):
                cases.read_model(*folder)
            continue
        facts = cases.read_model(*folder)[0].preprocessing["audio"]
        assert (facts["hop"], facts["n_fft"], facts["window_s"]) == (320, 512, 4.0)


# ---- live: what a file leaves out is as in the published class ----


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", IMAGE_DEFAULTS)
def test_defaults_of_pictures_are_published(kind):
    published = json.loads(json.dumps(cases.published_class(kind)().to_dict(), default=str))
    for name, value in IMAGE_DEFAULTS[kind].items():
        # Grids are those of config.json; a native tower says its patches' size.
        if name != "image_grid_pinpoints" and (name != "patch_size" or kind != "qwen3_vl"):
            assert published[name] == value, name


@pytest.mark.slow
def test_defaults_of_sounds_are_published():
    published = load("transformers").WhisperFeatureExtractor().to_dict()
    assert {name: published[name] for name in AUDIO_DEFAULTS} == AUDIO_DEFAULTS
