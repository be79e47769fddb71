"""Sounds written here and those of ../shared/data: lengths, values, resampling, bad files."""

from __future__ import annotations

import logging

import av
import numpy as np
import pytest

from dflop_jax.data.media.audio import count_samples, read_sound, resample
from tests.data.media_cases import shared_files, write_wav


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
