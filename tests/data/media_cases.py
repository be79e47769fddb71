"""Media for tests: those of ../shared/data where it is there, and some made here."""

from __future__ import annotations

import io
import json
import tarfile
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

from dflop_jax.data.media.kind import IMAGE, Kind, with_keys
from dflop_jax.data.media.video import ClipHeader, clip_header
from models.processors import IMAGENET_MEAN, IMAGENET_STD

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared_files(kind: str) -> list[Path]:
    """Files of ../shared/data/images, videos or audio; none without it."""
    folder = SHARED / kind
    return sorted(folder.iterdir()) if folder.is_dir() else []


def count_frames(path, most: int) -> int:
    """Frames of a clip that are sampled, at most so many."""
    return min(most, clip_header(path)["frames"])


def clip_of(path) -> ClipHeader:
    """What a clip's header says."""
    header = clip_header(path)
    return ClipHeader(*(header[name] for name in ClipHeader._fields))


def upright(path: Path) -> Image.Image:
    """What the published processors are given: the first frame, turned as EXIF says."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image)


def normalized(pixels: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] as InternViT takes them, float32."""
    scaled = pixels.astype(np.float32) / np.float32(255)
    return (scaled - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Smooth noise with a wide range of values, uint8."""
    rng = np.random.default_rng(height * 10007 + width)
    small = rng.integers(0, 256, (height // 6 + 2, width // 6 + 2, channels)).astype(np.uint8)
    image = Image.fromarray(small.squeeze(-1) if channels == 1 else small)
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def made_pictures(folder: Path) -> list[Path]:
    """Pictures of odd sizes, modes and orientations."""
    exif = Image.Exif()
    exif[0x0112] = 6
    made = {
        "one.png": (Image.fromarray(noise(1, 1)), {}),
        "thin.png": (Image.fromarray(noise(3, 900)), {}),
        "exact.png": (Image.fromarray(noise(384, 768)), {}),
        "turned.jpg": (Image.fromarray(noise(300, 500)), {"exif": exif}),
        "cmyk.jpg": (Image.fromarray(noise(200, 310)).convert("CMYK"), {}),
        "grey.png": (Image.fromarray(noise(123, 45, 1)), {}),
        "alpha.png": (Image.fromarray(noise(400, 410, 4)), {}),
        "palette.png": (Image.fromarray(noise(77, 99)).convert("P"), {}),
        "moving.gif": (
            Image.fromarray(noise(60, 50)),
            {"save_all": True, "append_images": [Image.fromarray(noise(60, 50)[::-1])]},
        ),
    }
    for name, (image, options) in made.items():
        image.save(folder / name, **options)
    return [folder / name for name in made]


def write_wav(path: Path, samples: np.ndarray, rate_hz: int) -> Path:
    """A 16-bit sound; int [channels, n]."""
    with wave.open(str(path), "wb") as out:
        out.setnchannels(len(samples))
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(np.ascontiguousarray(samples.T).astype("<i2").tobytes())
    return path


def write_clip(path: Path, frames: Any, rate: int = 4, codec="", times=(), encoder=None, **options):
    """A clip of these pictures of 64 x 48 pixels, or of a number of equal ones; picture k is shown
    at `times`[k] of 1 / rate seconds."""
    pictures = [noise(48, 64)] * frames if isinstance(frames, int) else frames
    codec = codec or {".webm": "libvpx", ".ts": "libx264"}.get(path.suffix, "mpeg4")
    with av.open(str(path), "w", options=options) as out:
        stream = out.add_stream(codec, rate=rate, options=encoder or {})
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        out.start_encoding()
        for k, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = times[k] if times else k
            out.mux(stream.encode(frame))
        if pictures:
            out.mux(stream.encode())
    return path


def talk(*texts: str) -> list[dict[str, str]]:
    """LLaVA-format turns, a question first."""
    return [{"from": ("human", "gpt")[k % 2], "value": t} for k, t in enumerate(texts)]


def made_dataset(folder: Path, n: int = 12) -> Path:
    """A LLaVA-format dataset of every kind of record: the file."""
    folder.mkdir(exist_ok=True)
    pictures = made_pictures(folder)
    write_wav(folder / "a.wav", np.full((1, 30_000), 900), 8000)
    write_clip(folder / "a.mp4", 9)
    kinds = [
        {"conversations": talk("Say <b>.", "One.")},
        {"image": pictures[2].name, "conversations": talk("<image>\nWhat?", "Two.")},
        {"image": [p.name for p in pictures[3:6]],
         "conversations": talk("<image> and <image>", "a", "or <image>?", "b")},
        {"video": "a.mp4", "conversations": talk("<image>\nMoves?", "Yes.")},
        {"audio": "a.wav", "conversations": talk("Hear <audio>", "Noise.")},
    ]  # fmt: skip
    records = [{"id": f"r{k}", **kinds[k % len(kinds)]} for k in range(n)]
    (folder / "dataset.json").write_text(json.dumps(records, indent=1))
    return folder / "dataset.json"


def make_shards(dataset: Path, folder: Path, per_shard: int = 5) -> list[Path]:
    """WebDataset shards of a LLaVA-format dataset: the media beside each record."""
    folder.mkdir(exist_ok=True)
    records = json.loads(dataset.read_text())
    shards = []
    for first in range(0, len(records), per_shard):
        shards.append(folder / f"s-{first // per_shard:03d}.tar")
        with tarfile.open(shards[-1], "w") as tar:
            for k, record in enumerate(records[first : first + per_shard], first):
                record = dict(record)
                for kind in ("image", "video", "audio"):
                    found = record.get(kind) or []
                    found = found if isinstance(found, list) else [found]
                    ours = [f"{k:06d}.{j}.{name.split('/')[-1]}" for j, name in enumerate(found)]
                    for name, own in zip(found, ours, strict=True):
                        tar.add(dataset.parent / name, own)
                    if ours:
                        record[kind] = ours
                add_bytes(tar, f"{k:06d}.json", json.dumps(record).encode())
    return shards


def add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """A member of the given content."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def with_columns(kind: Kind, **columns: Any) -> dict[str, Any]:
    """Headers of a kind, with 0 in the columns that are not given."""
    shape = np.shape(next(iter(columns.values())))
    return {name: np.zeros(shape, int) for name in kind.columns} | columns


def picture_header(width: int, height: int, **keys: float) -> dict[str, int]:
    return with_keys(with_columns(IMAGE, width=width, height=height), keys)
