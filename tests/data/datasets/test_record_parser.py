"""LLaVA-format files: what loads, what is left out and why, and the real shared media."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, make_source
from dflop_jax.data.datasets.blob import MediaRoots
from dflop_jax.data.datasets.record_parser import parse_record
from dflop_jax.data.media.mel import MelSpec
from tests.data.media_cases import talk as turns
from tests.data.media_cases import write_wav
from tests.data.views import from_pictures, media_spec, tiles, tokens

SPEC = media_spec(16, 4)
HEARING = media_spec(28, 4, "anyres", 4, MelSpec(n_mels=4, window_s=1, max_windows=3))
TOKENIZER = ByteTokenizer()


def record(i, **changes):
    said = turns("<image>\nWhat?", f"Number {i}.")
    return {"id": f"r{i}", "image": "a.png", "conversations": said, **changes}


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (32, 16), "red").save(tmp_path / "a.png")
    Image.new("RGB", (10, 10), "blue").save(tmp_path / "b.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "empty.png").write_bytes(b"")
    write_wav(tmp_path / "a.wav", np.full((1, 8000), 900), 8000)
    return tmp_path


def load(folder, records, **options):
    (folder / "dataset.json").write_text(json.dumps(records))
    return open_path(folder, **{"max_bad_fraction": 1.0, **options})


def open_path(path, split="train", n_held_out=0, spec=SPEC, **options):
    """What a run makes of a path; its index is made anew each time."""
    index = (path if path.is_dir() else path.parent) / "index"
    shutil.rmtree(index, ignore_errors=True)
    config = DataConfig(path=str(path), **options)
    return make_source(config, spec, split, n_held_out=n_held_out, index_dir=index)


def text_of(sample):
    return TOKENIZER.decode(tokens(sample)[~from_pictures(sample)])


def weights_by_token(sample):
    """The weight of every token, which stands one before it."""
    weights = sample.fields["llm"]["weights"]
    return np.concatenate([np.zeros(1), weights[:-1]])


def test_answers_and_records_have_weights(folder):
    """Of a prompt only where prompts are trained on, of what is held out none."""
    talk = turns("Say", "one <image> two", "and", "three")
    talk[1]["weight"] = 0.5
    row = record(0, conversations=talk, weight=4)
    sample = load(folder, [row]).sample(0)
    ids, weights = tokens(sample), weights_by_token(sample)
    shown = {w: TOKENIZER.decode(ids[weights == w]) for w in (2.0, 4.0)}
    assert shown == {2.0: "one  two", 4.0: "three"}
    assert set(np.unique(weights)) == {0.0, 2.0, 4.0}
    assert not weights[from_pictures(sample)].any()
    everything = load(folder, [row], loss_on_prompts=True).sample(0)
    also = weights_by_token(everything)
    np.testing.assert_array_equal(also[weights > 0], weights[weights > 0])
    rest = (weights == 0) & ~from_pictures(sample)
    assert (also[rest][1:] == 1).all()
    assert not also[from_pictures(sample)].any()
    held = load(folder, [row, record(1)], split="eval", n_held_out=1, loss_on_prompts=True)
    assert set(np.unique(held.sample(0).fields["llm"]["weights"])) == {0.0, 1.0}


BAD = {
    "the weight of the record is -1, not a number": {"weight": -1},
    "missing file": {"image": "none.png"},
    "empty.png": {"image": "empty.png"},
    "not a readable video": {"image": None, "video": "empty.png",
                             "conversations": turns("<video>", "a")},
    "broken.png": {"image": "broken.png"},  # whose header is fine
}  # fmt: skip


def test_bad_records_are_named_and_left_out(folder):
    records = [record(k, **changes) for k, changes in enumerate(BAD.values())]
    source = load(folder, [*records, record(len(BAD))])
    (unusable,) = (folder / "index").glob("*.unusable.txt")
    lines = unusable.read_text().splitlines()
    assert len(lines) == source.counts["unusable"] == len(BAD) - 1
    for k, (line, reason) in enumerate(zip(lines, BAD)):
        assert line.startswith(f"dataset.json[{k}] id=r{k}")
        assert reason in line
    with pytest.raises(ValueError, match=rf"json\[{len(BAD) - 1}\] id=r.*broken\.png") as caught:
        source.sample(0)
    assert "\n" not in str(caught.value)
    assert source.sample(1).load == source.load(1)
    with pytest.raises(ValueError, match=r"4 of 6 records .*r0.*max_bad_fraction"):
        load(folder, [*records, record(len(BAD))], max_bad_fraction=0.4)
    with pytest.raises(ValueError, match=r"1 of 1 records are unusable .*none\.png"):
        load(folder, [record(0, image="none.png")])


@pytest.mark.parametrize(
    "content, reason",
    [("[{", "not JSON"), ('{"a": 1}', "expected a JSON list"), ("[]", "holds no records"),
     ('[{"id": 1}]', "1 of 1 records"), ("\xff", "not JSON"), ("", "d.json: empty"),
     (" \n", "empty, expected"), ("\xff\xfe[\0]\0", "UTF-16"), ("[\0]\0", "UTF-16")],
)  # fmt: skip
def test_an_unusable_file_is_one_line(folder, content, reason):
    (folder / "d.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=reason) as caught:
        open_path(folder / "d.json")
    assert "\n" not in str(caught.value)
    assert "d.json" in str(caught.value)


def test_finding_the_file(folder):
    for name, remedy in [
        ("t.json", "repair it, or name it .jsonl if"), ("t.csv", "give one, JSON lines"),
        ("t", "this is not read"),
    ]:  # fmt: skip
        (folder / name).write_text("id,question\n1,Why?\n")
        with pytest.raises(ValueError, match=remedy):
            open_path(folder / name)
        (folder / name).unlink()
    with pytest.raises(ValueError, match="no such file"):
        open_path(folder / "none.json")
    with pytest.raises(ValueError, match=r"0 \.json"):
        open_path(folder)
    (folder / "x.jsonl").write_text(json.dumps(record(0)) + "\n\n" + json.dumps(record(1)))
    assert len(open_path(folder)) == 2
    (folder / "y.json").write_text(json.dumps([record(0)]))
    for path, why in [(folder, r"2 \.json"), (folder / "*.json*", "list them in a YAML mixture")]:
        with pytest.raises(ValueError, match=why):
            open_path(path)


def test_a_broken_line_is_named_by_file_and_line(folder, caplog):
    lines = [json.dumps(record(k)) for k in range(12)]
    lines[2] = lines[2][:30]
    (folder / "d.jsonl").write_text("\n".join([*lines[:5], "", *lines[5:]]))
    source = open_path(folder / "d.jsonl")
    assert len(source) == 11
    assert "left out 1 records (not JSON): d.jsonl:3: not JSON" in caplog.text
    assert source.label(10) == f"{folder}/d.jsonl:13"
    (folder / "a.png").unlink()
    with pytest.raises(ValueError, match=r"d\.jsonl:13 id=r11: missing file .*a\.png"):
        source.sample(10)


def test_make_source(folder):
    with pytest.raises(ValueError, match=r"data.loss_on_prompts needs records: give data.path"):
        make_source(DataConfig(loss_on_prompts=True), SPEC)
    assert len(make_source(DataConfig(n_samples=7), SPEC, "eval")) == 7
    assert len(make_source(DataConfig(n_samples=7), SPEC, "eval", n_held_out=9)) == 9
    (folder / "dataset.json").write_text(json.dumps([record(0)]))
    blank = open_path(folder, blank_images=True)
    assert (tiles(blank.sample(0)) == 128).all()
    heard = record(0, image=None, audio="a.wav", conversations=turns("<audio>", "noise"))
    with pytest.raises(ValueError, match="no record is usable: the model cannot take their media"):
        load(folder, [heard])


USABLE = {"bad_truncated_jpg", "bad_truncated_png", "bad_corrupt_idat_png", "odd_png_named_jpg",
          "bad_half_index_first", "good_control"}  # fmt: skip
HEARD = {"bad_truncated_flac"}  # usable by their headers where a model hears


@pytest.mark.parametrize("spec, usable", [(SPEC, USABLE), (HEARING, USABLE | HEARD)])
def test_all_shared_bad_records(shared_data, tmp_path, caplog, spec, usable):
    file = shared_data / "bad/bad_records.json"

    def source(**more):
        config = DataConfig(path=str(file), root=(str(shared_data),), **more)
        return make_source(config, spec, index_dir=tmp_path)

    kept = source(max_bad_fraction=1.0)
    (unusable,) = tmp_path.glob("*.unusable.txt")
    assert str(unusable) in caplog.text
    listed = json.loads(file.read_text())
    ids = [listed[int(kept.label(i).split("[")[1][:-1])]["id"] for i in range(len(kept))]
    assert set(ids) == usable
    assert kept.counts["left out"] == (spec is SPEC)  # the sound of HEARD
    for raw in listed:
        assert raw["id"] in USABLE | HEARD or f"id={raw['id']}" in unusable.read_text()
    for i, name in enumerate(ids):
        if name.startswith("bad"):  # only what is behind the header is broken
            with pytest.raises(ValueError, match=f"id={name}.*bad/"):
                kept.sample(i)
        else:
            assert kept.sample(i).load == kept.load(i)
    with pytest.raises(ValueError, match="15 of 22"):
        source()


# ---- every record that cannot be used ----

ONE_PICTURE = turns("<image>", "a")


def ask(content, answer="a", **more):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def tell(**more):
    """A record of LLaVA's format with one picture."""
    return {"conversations": ONE_PICTURE, "image": "a.png", **more}


def text(value):
    return {"type": "text", "text": value}


def image(value):
    return {"type": "image", "image": value}


# fmt: off
UNUSABLE = [
    # messages
    (ask(None), r"message 0 \(of user\) has no content"),
    (ask([]), "message 0 .* has no content"),
    (ask("q", ""), "message 1 .* has no content"),
    ({"messages": [{"role": "user"}]}, "has no content"),
    ({"messages": []}, "no conversations or messages"),
    ({"messages": "{"}, "not JSON"),
    ({"messages": ["hi"]}, "message 0 is not"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "from 'critic', not user"),
    ({"messages": ask("q")["messages"][:1]}, "do not alternate"),
    (ask("<image> q"), "1 <image> tags for 0 images"),
    (ask("q", images=["a.png"]), "0 <image> tags for 1 images"),
    (ask([{"type": "image"}, text("q")]), "1 <image> tags for 0 images"),
    (ask([image("a.png")], images=["b.png"]), "0 <image> tags for 1"),
    (ask([image("z.png")]), "missing file"),
    (ask([image("../z.png")]), "is outside"),
    (ask([{"type": "image_url", "image_url": "https://a.b/c.png"}]), "is a web address; download"),
    (ask([image("data:,%")]), "is not base64"),
    (ask([image(3)]), "is not a path or bytes"),
    (ask([{"type": "table"}]), "has a part .*'table'.*, not a text, image, video, audio"),
    (ask([text("<ima"), text("ge>")], image="a.png"), "spells a tag across its parts"),
    # conversations
    (tell(conversations=[]), "no conversations"),
    (tell(conversations=["hello"]), "not {from, value}"),
    (tell(conversations=1), "no conversations"),
    (tell(conversations=[[]] * 2000), "more than 1000 turns"),
    (tell(conversations=ONE_PICTURE[::-1]), "not human"),
    (tell(conversations=turns("<image>", " ")), "answer is empty"),
    (tell(conversations=turns("<image>", "a", "b")), "up to an answer"),
    (tell(conversations=[{"from": "robot", "value": "a"}]), "from 'robot'"),
    (tell(conversations=[{"from": ["human"], "value": "a"}]), "not human, gpt"),
    (tell(conversations=turns("<\ufdd2image>", "x")), r"U\+FDD2"),
    (tell(conversations=turns("<image><image>", "a")), "2 <image> tags for 1 images"),
    (tell(conversations=turns("no tag", "a")), "0 <image> tags for 1 images"),
    (tell(image=None), "1 <image> tags for 0 images"),
    (tell(image=5), "not a path or bytes"),
    (tell(image=["a.png"] * 2000), "more than 1000 media"),
    (tell(id="x" * 10_000, conversations=[]), "no conversations"),
    # weights
    (tell(weight=-1), "the weight of the record is -1, not a number"),
    (tell(conversations=[ONE_PICTURE[0], {**ONE_PICTURE[1], "weight": "much"}]), "of turn 1 is 'm"),
    (tell(conversations=[{**ONE_PICTURE[0], "weight": 1}, ONE_PICTURE[1]]), "turn 0 has a weight"),
    *(({"conversations": [{**t, "loss": v} for t in turns("Hi", "Bad")]}, "loss of turn 0 is .*;")
      for v in ("no", "", 2, [])),
    # questions
    ({"question": "  ", "answer": "x"}, "its question is not text"),
    ({"question": "Which <image 2>?", "answer": "x", "image_1": "a.png"}, "names <image 2>"),
    ({"question": "?", "answer": "Z", "options": "['a', 'b']"}, "'Z' is none of its 2 choices"),
    ({"question": "?", "answer": "A", "options": "a, b"}, "its choices are not a list"),
    ({"question": "?", "answer": "A", "options": "__import__('os')"}, "its choices are not a list"),
    ({"question": "<image>?", "answer": "A"}, "1 <image> tags for 0 images"),
    # fields beside them
    (ask("q", system=3), "not text"),
    (ask("q", tools="{"), "JSON"),
    (ask("q", chat_template_kwargs="[]"), "not an object"),
]
# fmt: on


@pytest.mark.parametrize("raw, reason", UNUSABLE)
def test_an_unusable_record_is_refused_in_one_line(tmp_path, raw, reason):
    (tmp_path / "a.png").write_bytes(b"a")
    with pytest.raises(ValueError, match=rf"^d\.json\[3\].*{reason}") as error:
        parse_record("d.json[3]", raw, MediaRoots([tmp_path]).resolve)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
