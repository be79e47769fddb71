"""Tables of questions as public sets have them: what is asked, seen and right."""

import io

import pytest
from PIL import Image

from dflop_jax.data.datasets.questions import BY_LETTER
from dflop_jax.data.datasets.readers import open_reader
from dflop_jax.data.datasets.record_parser import RecordFormat
from tests.data.datasets.test_tables import save_arrow, save_parquet
from tests.data.media_cases import noise


def picture(n):
    out = io.BytesIO()
    Image.fromarray(noise(8 + n, 9)).save(out, "png")
    return {"bytes": out.getvalue(), "path": f"{n}.png"}


DOCVQA = {"questionId": "7", "question": "What is the date?", "question_types": ["layout"],
          "image": picture(0), "answers": ["May 3", "May 3, 1999", "May 3"]}  # fmt: skip
CHARTQA = {
    "image": picture(1),
    "query": "How much in 2010?",
    "label": ["42.5"],
    "human_or_machine": 0,
}
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


def test_a_question_without_a_field_of_answers_says_which_are_read(tmp_path):
    with pytest.raises(ValueError, match=r"no answers or answer or .* beside its question"):
        records([{"prompt": "Why?", "reply": "So."}], tmp_path)


def test_a_conversation_goes_before_a_question_beside_it(tmp_path):
    talk = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]
    row = {"conversations": talk, "question": "Other?", "answer": "x"}
    assert RecordFormat().select_columns(row) == {"conversations": "conversations"}
    assert RecordFormat({"question": "question"}).select_columns(row).keys() == {
        "question",
        "answers",
    }
    (record,) = records([row], tmp_path)
    assert record.turns[1][1] == "Ho."
