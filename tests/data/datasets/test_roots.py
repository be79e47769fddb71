"""Records name files below the roots only, whatever their paths look like."""

from __future__ import annotations

import json

import pytest

from dflop_jax.data.datasets.mixture import load_mixture
from dflop_jax.data.datasets.readers import open_reader
from tests.data.media_cases import talk


def read(folder, name, roots=()):
    """The medium that a record of this path has."""
    record = {"id": "a", "image": name, "conversations": talk("<image>\nWhat?", "This.")}
    (folder / "dataset.json").write_text(json.dumps([record]))
    reader = open_reader(folder, roots)
    (place,) = reader.locate()
    ((_, path),) = reader.read(place).media
    return path


@pytest.fixture
def folders(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(b"a")
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "folder").symlink_to(outside)
    (inside / "own.png").symlink_to(inside / "a.png")
    (outside / "only.png").write_bytes(b"b")
    return inside, outside


OUTSIDE = ["{out}/a.png", "../out/a.png", "link.png", "folder/a.png", "../in/../out/a.png"]


@pytest.mark.parametrize("name", [*OUTSIDE, "/etc/passwd", "../out/none.png"])
def test_a_medium_outside_the_roots_is_refused(folders, name):
    inside, outside = folders
    with pytest.raises(ValueError, match=r"\[0\] id=a: .* leads out of .*data\.root"):
        read(inside, name.format(out=outside))
    if name in OUTSIDE:
        path = read(inside, name.format(out=outside), folders)
        assert path.resolve() == outside / "a.png"


@pytest.mark.parametrize("name", ["a.png", "own.png", "./a.png", "../in/a.png", "{in}/a.png"])
def test_a_medium_inside_the_roots_is_read(folders, name):
    path = read(folders[0], name.format(**{"in": folders[0]}))
    assert path.resolve() == folders[0] / "a.png"


def test_roots_are_looked_through_in_turn(folders):
    inside, outside = folders
    assert read(inside, "only.png", folders) == outside / "only.png"
    assert read(inside, "a.png", folders) == inside / "a.png"
    assert read(inside, "a.png", folders[::-1]) == outside / "a.png"
    with pytest.raises(ValueError, match="missing file"):
        read(inside, "none.png", folders)


def test_a_mixture_s_part_has_one_root_or_several(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("parts:\n- {path: a.json, root: x}\n- {path: b.json, root: [x, /y]}\n")
    one, two = load_mixture(file)
    assert (one.root, two.root) == ((f"{tmp_path}/x",), (f"{tmp_path}/x", "/y"))
