"""Log-mel features against the published Whisper extractor, counts against Qwen2-Audio's."""

from __future__ import annotations

import numpy as np
import pytest

from dflop_jax.data.media.mel import MelSpec, encoder_tokens, log_mel, sound_counts
from tests.verify.folders import load

SPEC = MelSpec()


def tone(n, hz=440.0):
    rng = np.random.default_rng(n)
    t = np.arange(n) / 16000
    return (0.3 * np.sin(2 * np.pi * hz * t) + 0.01 * rng.standard_normal(n)).astype(np.float32)


def test_made_sounds_are_the_extractor_s():
    extractor = load("transformers").WhisperFeatureExtractor(feature_size=128)
    for n in [321, 479, 480, 481, 16000, 479_999, 480_000, 480_001, 600_000]:
        sound = tone(n)
        out = extractor(sound, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
        got = log_mel(sound, SPEC)
        assert (got.shape, got.dtype) == ((1, 128, 3000), np.float32)
        assert np.abs(got[0] - out["input_features"][0]).max() < 1e-4  # torch's, in float32
        padded = np.pad(sound[:480_000], (0, max(0, 480_000 - n)))
        exact = extractor._np_extract_fbank_features([padded], "cpu")[0]  # numpy's, in float64
        assert np.abs(got[0] - exact).max() < 1e-6
        (windows,), (frames,), _ = sound_counts(np.array([n]), SPEC)
        assert (windows, frames) == (1, out["attention_mask"].sum())


def test_tokens_are_those_of_the_model_and_the_processor():
    torch, modeling = load("torch"), load("transformers.models.qwen2_audio.modeling_qwen2_audio")
    frames = torch.arange(3, 3001)
    encoder = object.__new__(modeling.Qwen2AudioEncoder)
    _, expected = encoder._get_feat_extract_output_lengths(frames)
    np.testing.assert_array_equal(encoder_tokens(frames.numpy()), expected.numpy())
    windows, _, tokens = sound_counts(frames.numpy() * 160, SPEC)
    np.testing.assert_array_equal(tokens, expected.numpy())
    assert (windows == 1).all()
    assert tokens[-1] == 750


def test_longer_sounds_take_more_windows_and_short_ones_none():
    spec = MelSpec(max_windows=3)
    sound = tone(480_000 + 16_000)
    features = log_mel(sound, spec)
    np.testing.assert_array_equal(features[0], log_mel(sound[:480_000], SPEC)[0])
    np.testing.assert_array_equal(features[1], log_mel(sound[480_000:], SPEC)[0])
    counts = sound_counts(np.array([496_000, 1_440_000, 9_999_999]), spec)
    assert [c.tolist() for c in counts] == [[2, 3, 3], [3100, 9000, 9000], [775, 2250, 2250]]
    assert [len(c) for c in sound_counts(np.zeros(0, int), SPEC)] == [0, 0, 0]
    assert log_mel(np.zeros(0, np.float32), SPEC).shape == (0, 128, 3000)
    assert sound_counts(np.array([0, 1, 320, 321]), SPEC)[2].tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="at least 1"):
        MelSpec(hop=0)
