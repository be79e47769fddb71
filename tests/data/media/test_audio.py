"""Sounds written here and those of ../shared/data: lengths, values, resampling, bad files; log-mel
features against the published Whisper extractor, counts against Qwen2-Audio's."""

from __future__ import annotations

import logging

import av
import numpy as np
import pytest

from dflop_jax.data.media.audio import count_samples, read_sound, resample
from dflop_jax.data.media.mel import MelSpec, encoder_tokens, log_mel, sound_counts
from tests.data.media_cases import shared_files, write_wav
from tests.verify.folders import load

SPEC = MelSpec()


@pytest.mark.parametrize("rate_hz", [8000, 11025, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("n", [1, 7, 30_000])
def test_length_is_that_of_the_header(tmp_path, rate_hz, n):
    samples = np.random.default_rng(1).integers(-9000, 9000, (2, n))
    path = write_wav(tmp_path / "a.wav", samples, rate_hz)
    count = count_samples(path, 16000)
    assert count == -(-n * 16000 // rate_hz)
    sound = read_sound(path, count, 16000)
    assert (sound.shape, sound.dtype) == ((count,), np.float32)
    part = read_sound(path, (count + 1) // 2, 16000)  # of a sound decoded in part only
    np.testing.assert_allclose(part, sound[: len(part)], atol=1e-6)
    if rate_hz == 16000:
        np.testing.assert_allclose(sound, samples.mean(0) / 32768, atol=1e-7)


@pytest.mark.parametrize("rate_hz", [8000, 22050, 44100, 48000])
def test_resampling_keeps_what_both_rates_can_hold(rate_hz):
    def sine(hz, rate):
        return np.sin(2 * np.pi * hz * np.arange(rate) / rate + 0.3).astype(np.float32)

    for hz in (50, 440, 3000, 3500, 7000):
        if hz < 0.46 * min(rate_hz, 16000):
            got = resample(sine(hz, rate_hz), rate_hz, 16000)
            assert len(got) == 16000
            np.testing.assert_allclose(got[500:-500], sine(hz, 16000)[500:-500], atol=2e-4)
    if rate_hz > 20000:  # above the new Nyquist frequency: nothing may come through
        high = resample(sine(8600, rate_hz), rate_hz, 16000)
        assert np.abs(high[500:-500]).max() < 1e-3
    assert len(resample(np.zeros(0, np.float32), rate_hz, 16000)) == 0


def test_every_shared_sound_decodes_as_its_header_says(caplog):
    with caplog.at_level(logging.WARNING):
        for path in shared_files("audio"):
            n = count_samples(path, 16000)
            with av.open(str(path)) as container:
                decoded = sum(f.samples for f in container.decode(audio=0))
                rate_hz = container.streams.audio[0].rate
            assert n == -(-decoded * 16000 // rate_hz), path
            assert read_sound(path, n, 16000).std() > 0
    assert caplog.text == ""


@pytest.mark.parametrize("codec, xing", [("aac", "0"), ("mp3", "0"), ("mp3", "1")])
def test_length_is_what_decodes_where_the_header_is_a_guess(tmp_path, codec, xing):
    path, rng = tmp_path / f"a.{codec}", np.random.default_rng(0)
    varied = {"flags": "+qscale", "global_quality": "1180"}  # of MP3, whose bit rate then varies
    with av.open(str(path), "w", options={"write_xing": xing} if codec == "mp3" else {}) as out:
        stream = out.add_stream(codec, rate=16000, options=varied if codec == "mp3" else {})
        stream.layout = "mono"
        loud = np.repeat([0.001, 0.5], 32000) * rng.standard_normal(64000)
        frame = av.AudioFrame.from_ndarray(loud[None].astype(np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with av.open(str(path)) as container:
        decoded = sum(f.samples for f in container.decode(audio=0))
    assert abs(count_samples(path, 16000) - decoded) < 10


def test_what_is_no_sound_or_breaks_off(tmp_path, caplog):
    path = tmp_path / "a.wav"
    for content in (b"", b"no sound", b"RIFF\x04\0\0\0WAVE"):
        path.write_bytes(content)
        for read in (count_samples, lambda path, rate_hz: read_sound(path, 10, rate_hz)):
            with pytest.raises(ValueError, match=r"a\.wav: .*(not a readable|only 0)"):
                read(path, 16000)
    write_wav(path, np.zeros((1, 0), int), 16000)
    with pytest.raises(ValueError, match="no samples"):
        count_samples(path, 16000)
    whole = write_wav(path, np.full((1, 16000), 8000), 16000).read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with caplog.at_level(logging.WARNING):
        sound = read_sound(path, 16000, 16000)
    assert "silence" in caplog.text
    assert sound[11000] > 0.2
    assert (sound[13000:] == 0).all()
    path.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(ValueError, match=r"a\.wav: only .* of 16000"):
        read_sound(path, 16000, 16000)


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
