"""Records in files and tar shards: found again by offset, and what is broken named."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from dflop_jax.data.datasets.blob import Blob, open_media
from dflop_jax.data.datasets.readers import find_files, open_reader
from dflop_jax.data.media.pictures import picture_size, read_picture
from tests.data.media_cases import add_bytes, made_dataset, make_shards, talk


def records(reader):
    """Every record, or the reason why it is unusable."""
    out = []
    for at in reader.locate():
        try:
            out.append(reader.read(at))
        except ValueError as e:
            out.append(str(e))
    return out


@pytest.mark.parametrize("per_shard", [1, 5])
def test_shards_hold_the_same_records_as_the_folder(tmp_path, per_shard):
    file = made_dataset(tmp_path / "a")
    make_shards(file, tmp_path / "s", per_shard)
    plain, packed = (records(open_reader(p)) for p in (file, tmp_path / "s"))
    for one, other in zip(plain, packed, strict=True):
        assert one.turns == other.turns
        for (kind, path), (same, blob) in zip(one.media, other.media, strict=True):
            assert kind == same
            assert blob.read() == path.read_bytes()
            with open_media(blob) as member:
                assert member.read() == path.read_bytes()


def test_media_names_when_a_record_names_none(tmp_path):
    image = io.BytesIO()
    Image.new("RGB", (7, 5), "red").save(image, "png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_bytes(tar, "d/1.a.png", image.getvalue())
        add_bytes(tar, "d/1.b.PNG", image.getvalue())
        two_tags = {"conversations": talk("<image><image>", "a")}
        add_bytes(tar, "d/1.json", json.dumps(two_tags).encode())
        add_bytes(tar, "d/2.png", image.getvalue())
        add_bytes(tar, "d/2.txt", b" A red field.\n")
        add_bytes(tar, "e/2.png", image.getvalue())  # another sample: another folder
        add_bytes(tar, "e/3.txt", b"nothing")
        add_bytes(tar, "e/4.json", b"{")
        named = {"image": "6.png", "conversations": talk("<image>", "a")}
        add_bytes(tar, "e/5.json", json.dumps(named).encode())
    one, two, *bad = records(open_reader(tmp_path / "a.tar"))
    assert [b.name for _, b in one.media] == ["d/1.a.png", "d/1.b.PNG"]
    assert two.turns == (("human", "<image>\nDescribe the image."), ("gpt", "A red field."))
    blob = two.media[0][1]
    assert picture_size(blob) == (7, 5)
    assert np.asarray(read_picture(blob)).tolist() == [[[255, 0, 0]] * 7] * 5
    why = ["no .json or .txt", "0 media", "not JSON", "missing file 6"]
    assert all(expected in reason for reason, expected in zip(bad, why, strict=True))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # -sig: with a byte order mark
def test_jsonl_and_json_are_read_by_offset(tmp_path, encoding):
    items = [{"id": k, "conversations": talk("é" * k, "å\n")} for k in range(5)]
    lines = [json.dumps(i, ensure_ascii=False) for i in items]
    (tmp_path / "a.jsonl").write_text("\n\n".join([*lines[:2], '{"id": 3, ', *lines[2:]]), encoding)
    (tmp_path / "b.json").write_text(json.dumps([items[1], *items, {}], indent=2), encoding)
    one, other = (records(open_reader(tmp_path / f)) for f in ("a.jsonl", "b.json"))
    assert "not JSON" in one.pop(2)
    assert "no conversations" in other.pop()
    assert [r.turns for r in one] == [r.turns for r in other[1:]] == [
        tuple((t["from"], t["value"]) for t in i["conversations"]) for i in items
    ]  # fmt: skip


def test_which_shards_a_path_names(tmp_path):
    for name in ("s-08.tar", "s-09.tar", "s-10.tar"):
        with tarfile.open(tmp_path / name, "w"):
            pass
    three = tuple(tmp_path / f"s-{k:02d}.tar" for k in (8, 9, 10))
    for path in (tmp_path, f"{tmp_path}/s-{{08..10}}.tar", f"{tmp_path}/s-*.tar"):
        assert find_files(str(path)) == three
    assert find_files(str(three[0])) == three[:1]
    assert list(open_reader(tmp_path).locate()) == []
    for path, why in [("s-{08..11}.tar", "1 of 4 files are"), ("x-*.tar", "no file matches"),
                      ("x.json", "no such file")]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            open_reader(tmp_path / path)
    (tmp_path / "z.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"z\.tar\.gz: shards must be plain"):
        open_reader(tmp_path / "z.tar.gz")


def test_a_section_reads_like_a_file_of_its_own(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    blob = Blob(tmp_path / "a", 50, 100, "part")
    with open_media(blob) as part:
        assert part.read() == bytes(range(50, 150))
        assert part.seek(-3, io.SEEK_END) == 97
        assert part.read(10) == bytes([147, 148, 149])
        assert part.seek(2) == 2
        assert part.read(2) == bytes([52, 53])
        assert part.seek(500) == 500
        assert part.read() == b""
        with pytest.raises(OSError, match="before its start"):
            part.seek(-1)
    with pytest.raises(OSError, match="ends inside"):
        Blob(tmp_path / "a", 150, 51, "part").read()


# ---- folders of media ----


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


def test_media_are_read_below_the_roots_alone_which_are_looked_through_in_turn(folders):
    inside, outside = folders
    for name in ("{out}/a.png", "../out/a.png", "link.png", "folder/a.png", "../in/../out/a.png",
                 "/etc/passwd", "../out/none.png"):  # fmt: skip
        with pytest.raises(ValueError, match=r"\[0\] id=a: .* is outside .*data\.root"):
            read(inside, name.format(out=outside))
        if name.endswith("a.png"):
            path = read(inside, name.format(out=outside), folders)
            assert path.resolve() == outside / "a.png"
    for name in ("a.png", "own.png", "./a.png", "../in/a.png", f"{inside}/a.png"):
        assert read(inside, name).resolve() == inside / "a.png"
    assert read(inside, "only.png", folders) == outside / "only.png"
    assert read(inside, "a.png", folders) == inside / "a.png"
    assert read(inside, "a.png", folders[::-1]) == outside / "a.png"
    with pytest.raises(ValueError, match="missing file"):
        read(inside, "none.png", folders)
