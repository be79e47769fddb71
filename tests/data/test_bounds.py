"""Files that claim to be huge, or open others: one line each, before anything is allocated."""

from __future__ import annotations

import socket
import struct
import tarfile

import numpy as np
import pytest

from dflop_jax.data.bounds import MAX_RATE_HZ, MAX_RECORD_BYTES, errors_as, read_bounded
from dflop_jax.data.datasets.blob import Blob
from dflop_jax.data.datasets.readers import find_files, open_reader
from dflop_jax.data.media.audio import count_samples, read_sound
from dflop_jax.data.media.pictures import picture_size
from dflop_jax.data.media.video import read_frames
from dflop_jax.data.text.tokenize import read_json
from tests.data.media_cases import count_frames

PLAYLISTS = {
    "m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:{}/a.ts\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {} RTP/AVP 96\n",
    "ffconcat": "ffconcat version 1.0\nfile http://127.0.0.1:{}/a.mp4\n",
}


@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_fetches_nothing(tmp_path, kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for suffix in (kind, "mp4"):
            path = tmp_path / f"a.{suffix}"
            path.write_text(PLAYLISTS[kind].format(server.getsockname()[1]))
            for read in (lambda p: count_frames(p, 4), lambda p: read_frames(p, 1, np.asarray),
                         lambda p: count_samples(p, 16000)):  # fmt: skip
                with pytest.raises(ValueError, match=f"a.{suffix}: not a readable") as caught:
                    read(path)
                assert "\n" not in str(caught.value)
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()


def write_wav(path, rate_hz, channels=1, n=4000):
    """A sound whose header claims what it is told to."""
    data = np.zeros(n, "<i2").tobytes()
    head = struct.pack("<IHHIIHH", 16, 1, channels, rate_hz, 2 * rate_hz % 2**32, 2 * channels, 16)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    return path


@pytest.mark.parametrize("rate_hz", [0, 999, 50_001, 191_999, MAX_RATE_HZ + 1])
def test_no_filter_of_the_file_s_choice(tmp_path, rate_hz):
    path = write_wav(tmp_path / "a.wav", rate_hz)
    for read in (lambda: count_samples(path, 16000), lambda: read_sound(path, 10, 16000)):
        with pytest.raises(ValueError, match=r"a\.wav: not a readable audio file"):
            read()


def test_slow_rates_decode_no_more_than_is_asked_for(tmp_path):
    path = write_wav(tmp_path / "a.wav", 1000, n=900_000)
    assert count_samples(path, 16000) == 14_400_000
    assert len(read_sound(path, 16_000, 16000)) == 16_000


def test_deep_json_and_large_files(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / "a.jsonl").write_bytes(deep + b'\n{"id": [[]]}')
    reader = open_reader(tmp_path / "a.jsonl")
    first, second = reader.locate()
    for place, why in [(first, "not JSON"), (second, r"a\.jsonl:2: no conversations")]:
        with pytest.raises(ValueError, match=why):
            reader.read(place)
    (tmp_path / "a.json").write_bytes(deep)
    for read in (lambda p: list(open_reader(p).locate()), read_json):
        with pytest.raises(ValueError, match=r"a\.json: not (JSON|a JSON object)"):
            read(tmp_path / "a.json")
    with pytest.raises(ValueError, match="larger than the limit of 10 bytes"):
        read_bounded(tmp_path / "a.json", 10)
    with pytest.raises(ValueError, match="more than"):
        Blob(tmp_path / "a.json", 0, MAX_RECORD_BYTES + 1, "a").read()


def tar_header(name, size, kind=b"0"):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = abs(size)
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if size < 0:  # base 256
        head[124:136] = (2**96 + size).to_bytes(12, "big")
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head[:512])
    return bytes(head)


@pytest.mark.parametrize(
    "data",
    [tar_header("a.json", 1 << 40), tar_header("a", 1 << 40, tarfile.GNUTYPE_LONGNAME),
     tar_header("a", 1 << 40, tarfile.XHDTYPE), tar_header("a.json", -512),
     tar_header("a", -1024, tarfile.XHDTYPE), tar_header("x", 1, tarfile.GNUTYPE_LONGNAME) * 3000,
     b"".join(tar_header(f"a.{k}.png", 0) for k in range(1002))],
    ids=["huge", "long name", "attributes", "negative", "negative attributes", "nested", "many"],
)  # fmt: skip
def test_hostile_tars_are_one_line(tmp_path, data):
    (tmp_path / "a.tar").write_bytes(data + bytes(1024))
    with pytest.raises(ValueError, match=r"a\.tar: broken tar|1000 members of sample"):
        list(open_reader(tmp_path / "a.tar").locate())


def test_paths_that_are_too_long_or_name_too_many_shards():
    with pytest.raises(ValueError, match="aaa: file name too long") as caught:
        open_reader("a" * 5000)
    assert len(str(caught.value)) < 500
    for last in ("999999999999", "9" * 5000):
        with pytest.raises(ValueError, match="shards"):
            find_files("a-{0.." + last + "}.tar")


def test_any_error_of_a_library_is_one_line(tmp_path):
    class PanicException(BaseException):  # as Rust libraries raise it
        pass

    for error in (MemoryError(), AttributeError("no\nrate"), PanicException("a")):
        reason = f"a.png: bad .{type(error).__name__}"
        with pytest.raises(ValueError, match=reason) as caught, errors_as("a.png: bad"):
            raise error
        assert "\n" not in str(caught.value)
    with pytest.raises(KeyboardInterrupt), errors_as("a"):
        raise KeyboardInterrupt
    (tmp_path / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    with pytest.raises(ValueError, match=r"a\.eps: not a readable picture"):
        picture_size(tmp_path / "a.eps")
