"""Messages say what conversations say, questions of public sets what they ask and answer."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
from PIL import Image

from dflop_jax.data import ByteTokenizer
from dflop_jax.data.datasets.blob import MediaRoots
from dflop_jax.data.datasets.conversations import BY_LETTER
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.record_parser import RecordFormat, parse_record
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import encode_chatml
from tests.data.datasets.test_tables import save_arrow, save_parquet
from tests.data.media_cases import noise, talk
from tests.data.text.test_chat import CHATML, write

TEXTS = ("<image> and <image>\nWhich?", "The first.", "Hear <audio>?", "No.")
CONVERSATION = {
    "id": 7, "conversations": [{"from": "system", "value": "Be brief."}, *talk(*TEXTS)],
    "image": ["a.png", "b.png"], "audio": "c.wav",
}  # fmt: skip


def text(value):
    return {"type": "text", "text": value}


def messages(*contents):
    roles = ["system", *["user", "assistant"] * 2]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def answered(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SAME = {
    "tags in text": {
        "messages": messages("Be brief.", *TEXTS), "images": ["a.png", "b.png"],
        "audios": ["c.wav"],
    },
    "typed parts": {
        "messages": messages(
            [text("Be "), text("brief.")],
            [{"type": "image"}, text(" and "), {"type": "image", "text": None}, text("\nWhich?")],
            "The first.", [text("Hear "), {"type": "audio"}, text("?")], [text("No.")],
        ),
        "image": [{"bytes": None, "path": "a.png"}, "b.png"], "audio": "c.wav",
    },
    "parts that name their media": {
        "messages": messages(
            "Be brief.",
            [{"type": "image", "image": "a.png"}, text(" and "),
             {"type": "image_url", "image_url": {"url": "file://b.png"}}, text("\nWhich?")],
            "The first.", [text("Hear "), {"type": "audio", "path": "c.wav"}, text("?")], "No.",
        ),
    },
}  # fmt: skip


def record(raw, folder, **options):
    return parse_record("d.json[3]", raw, MediaRoots([folder]).resolve, RecordFormat(**options))


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "c.wav"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize("form", SAME)
def test_messages_give_the_tokens_of_the_conversation(folder, form):
    one, other = record(CONVERSATION, folder), record({"id": 7, **SAME[form]}, folder)
    assert one == other
    write(folder / "t", CHATML)
    encode = ChatTokenizer(folder / "t").encode_turns
    assert encode(one.turns) == encode(other.turns)


def test_bytes_stand_before_a_path_and_in_addresses(folder):
    address = f"data:image/png;base64,{base64.b64encode(b'abc').decode()}"
    for given in ({"bytes": b"abc", "path": "a.png"}, b"abc", address):
        part = {"type": "image", "image": given}
        ((kind, medium),) = record({"messages": answered([part], "a")}, folder).media
        assert (kind, medium.data) == ("image", b"abc")


def test_a_record_of_text_alone_needs_no_column_of_pictures(tmp_path):
    said, seen = answered("Why?", "So."), answered("<image> Why?", "So.")
    rows = [{"chat": said}, {"chat": said, "image": "a.png"}, {"chat": seen}, {"talk": said}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reader = open_reader(tmp_path / "d.jsonl", columns={"messages": "chat", "image": "pictures"})
    places = list(reader.locate())
    for place in places[:2]:  # the name that a user gives goes before the usual one
        assert reader.read(place).turns == (("human", "Why?"), ("gpt", "So."))
        assert reader.read(place).media == ()
    with pytest.raises(ValueError, match=r"d\.jsonl:3: no column 'pictures'; there are chat$"):
        reader.read(places[2])
    with pytest.raises(ValueError, match=r"d\.jsonl:4: no column 'chat'; there are talk$"):
        reader.read(places[3])
    plain = open_reader(tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match=r"no conversations, messages, question; there are talk$"):
        plain.read(places[3])
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": "What?", "a": "That."}))
    names = {"question": "q", "answers": "a", "image": "pictures"}  # which say nothing by a tag
    reader = open_reader(tmp_path / "q.jsonl", columns=names)
    with pytest.raises(ValueError, match=r"no column 'pictures'; there are q, a$"):
        reader.read(*reader.locate())


@pytest.mark.parametrize(
    "question, answer, media",
    [("In HTML?", "Write <video>.", {}), ([text("The <audio> tag?")], [text("It plays.")], {}),
     ("<image>\nWhich?", "An <image> of SVG.", {"image": "a.png"})],
)  # fmt: skip
def test_tags_for_which_no_medium_is_left_are_text(folder, question, answer, media):
    n_media = len(media)
    found = record({"messages": answered(question, answer), **media}, folder)
    assert len(found.media) == n_media
    pieces = encode_chatml(found.turns, ByteTokenizer())
    assert sum(p.medium >= 0 for p in pieces) == n_media
    spelled = "".join(ByteTokenizer().decode(p.ids) for p in pieces)
    assert re.search("<video>|<audio>|An <image>", spelled)


@pytest.mark.parametrize("switch", ["loss", "train"])
@pytest.mark.parametrize("off, on", [(False, True), (0, 1), ("false", "true")])
def test_an_answer_may_be_left_out_of_the_loss(folder, switch, off, on):
    turns = [*answered("Hi", "Bad"), *answered("Again", "Good"), *answered("And", "so")]
    turns[1][switch], turns[3][switch], turns[5][switch] = off, on, None
    assert record({"messages": turns}, folder).weights == (0.0, 1.0, 1.0)


def test_a_system_prompt_may_stand_beside_the_conversation(folder):
    raw = {"conversations": talk("Hello?", "Arr!"), "system": "No <image>, be a pirate."}
    found = record(raw, folder)
    assert [role for role, _ in found.turns] == ["system", "human", "gpt"]
    assert found.media == ()
    ids = [i for p in encode_chatml(found.turns, ByteTokenizer()) for i in p.ids]
    assert "No <image>, be a pirate." in ByteTokenizer().decode(ids)
    with pytest.raises(ValueError, match="a system field and a system turn"):
        record({"messages": messages("Be brief.", *TEXTS), "system": "Be long."}, folder)


def test_keys_that_are_not_read_are_named(folder):
    part = {"type": "image", "image": "a.png", "max_pixels": 9, "fps": None, "detail": 1}
    turns = answered([part], "a")
    turns[1]["mood"] = 1
    raw = {"messages": turns, "split": "train", "note": "", "tools": '[{"name": "f"}]'}
    found = record(raw, folder)
    assert (found.unread, found.keys) == (("detail", "split"), ({"max_pixels": 9},))
    assert found.fields.names == {"mood", "tools"}
    assert found.fields.variables == {"tools": [{"name": "f"}]}


def test_an_answer_may_be_a_call_of_a_tool_alone(folder):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    turns = [{"role": "user", "content": "q"}, calls, {"role": "tool", "content": "3"}]
    found = record({"messages": [*turns, {"role": "assistant", "content": "a"}]}, folder)
    assert [role for role, _ in found.turns] == ["human", "gpt", "tool", "gpt"]
    with pytest.raises(ValueError, match="alternate"):
        record({"messages": [turns[0], turns[2], calls]}, folder)


# ---- questions ----


def picture(n):
    out = io.BytesIO()
    Image.fromarray(noise(8 + n, 9)).save(out, "png")
    return {"bytes": out.getvalue(), "path": f"{n}.png"}


DOCVQA = {"questionId": "7", "question": "What is the date?", "question_types": ["layout"],
          "image": picture(0), "answers": ["May 3", "May 3, 1999", "May 3"]}  # fmt: skip
CHARTQA = {"image": picture(1), "query": "How much in 2010?", "label": ["42.5"], "human": 0}
NO_IMAGES = {f"image_{n}": None for n in range(1, 8)}
MMMU = {"id": "validation_Art_1", "question": "Which, <image 2> or <image 1>?",
        "options": "['the first', \"the <image 2>\", 'none']", "answer": "B", **NO_IMAGES,
        "image_1": picture(2), "image_2": picture(3), "image_3": picture(4)}  # fmt: skip
SCIENCEQA = {"image": None, "question": "Which is hot?", "choices": ["ice", "fire"], "answer": 1}
CHOICES = "A. the first\nB. the <image>\nC. none"


def records(rows, tmp_path, save=save_parquet, **how):
    file = save(rows, tmp_path / f"set.{save.__name__.removeprefix('save_')}")
    reader = open_reader(file, **how)
    return [reader.read(located) for located in reader.locate()]


@pytest.mark.parametrize("save", [save_parquet, save_arrow])
def test_public_sets(tmp_path, save):
    (doc,) = records([DOCVQA], tmp_path / "doc", save)
    assert doc.turns == (("human", "<image>\nWhat is the date?"), ("gpt", "May 3"))
    assert [kind for kind, _ in doc.media] == ["image"]
    (chart,) = records([CHARTQA], tmp_path / "chart", save)
    assert chart.turns == (("human", "<image>\nHow much in 2010?"), ("gpt", "42.5"))
    (mmmu,) = records([MMMU], tmp_path / "mmmu", save)
    text = f"<image>\nWhich, <image> or <image>?\n{CHOICES}\n{BY_LETTER}"
    assert mmmu.turns == (("human", text), ("gpt", "B"))
    # The third is not named, then those that are in the order of the text.
    assert [f.name for _, f in mmmu.media] == ["4.png", "3.png", "2.png", "3.png"]
    for answer in ("completion", "response"):
        (plain,) = records([{"prompt": "Why?", answer: "So."}], tmp_path / answer, save)
        assert plain.turns == (("human", "Why?"), ("gpt", "So."))
    (science,) = records([SCIENCEQA], tmp_path / "science", save)
    text = f"Which is hot?\nA. ice\nB. fire\n{BY_LETTER}"
    assert (science.turns, science.media) == ((("human", text), ("gpt", "B")), ())


def test_columns_of_other_names_and_questions_without_answers(tmp_path):
    row = {"frage": "Was?", "antwort": "Das.", "bild": picture(0)}
    columns = {"question": "frage", "answers": "antwort", "image": "bild"}
    (named,) = records([row], tmp_path, columns=columns)
    assert named.turns == (("human", "<image>\nWas?"), ("gpt", "Das."))
    (later,) = records([{"question": "How?", "answers": [" ", "So."]}], tmp_path / "later")
    assert later.turns[-1] == ("gpt", "So.")
    for answers in ([], [" "], None):
        with pytest.raises(ValueError, match="an answer is empty"):
            records([{"question": "Why?", "answers": answers}], tmp_path / "bare")
    with pytest.raises(ValueError, match=r"its question has no answers or answer or "):
        records([{"prompt": "Why?", "reply": "So."}], tmp_path)


def test_a_conversation_goes_before_a_question_beside_it(tmp_path):
    row = {"conversations": talk("Hi?", "Ho."), "question": "Other?", "answer": "x"}
    (found,) = records([row], tmp_path)
    assert found.turns[1][1] == "Ho."
    (found,) = records([row], tmp_path, columns={"question": "question"})
    assert found.turns[1][1] == "x"
