"""Media for tests: those of ../shared/data where it is there, and some made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared_files(kind: str) -> list[Path]:
    """Files of ../shared/data/images, videos or audio; none without it."""
    folder = SHARED / kind
    return sorted(folder.iterdir()) if folder.is_dir() else []


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
