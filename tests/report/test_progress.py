"""Progress: plain lines in a log, a bar on a terminal."""

import contextlib
import io

import pytest
from rich.console import Console

from dflop_jax.report.progress import Progress, step_text
from tests.report.runs import make_row


def run(total: int, start: int = 0, terminal: bool = False, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Progress(total, start, console=console, **options) as p:
        for i in range(start, total):
            p.update(make_row(i, step_s=2.0))
    return out.getvalue()


@pytest.mark.parametrize(
    "total, start, every, steps",
    [(0, 0, 0, []), (1, 0, 0, [1]), (10, 0, 4, [4, 8, 10]), (10, 6, 4, [8, 10]), (5, 5, 0, [])],
)
def test_a_log_gets_a_plain_line_now_and_then(total, start, every, steps):
    lines = run(total, start, log_interval=every).splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {s}/{total}" for s in steps]
    assert all("\x1b" not in line for line in lines)


def test_a_line_says_how_training_goes():
    assert run(10, log_interval=4).splitlines()[0] == (
        "step 4/10  loss 1.250  2,000 tok/s  1.50 TFLOP/s  busy enc 60% llm 80%  left 12 s"
    )
    assert "  1.50 TFLOP/s  MFU 41.2%  busy" in step_text(make_row(0, mfu=0.412), 0.0)
    many = {f"m{i}": i / 10 for i in range(5)}
    assert "busy 0%-40%" in step_text(make_row(0, busy_fraction=many), 0.0)
    assert "busy" not in step_text(make_row(0, busy_fraction={}), 0.0)


def test_a_terminal_gets_a_bar_and_its_cursor_back():
    text = run(3, terminal=True)
    assert "━" in text
    assert "3/3" in text
    assert "step 3/3" not in text
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with contextlib.suppress(RuntimeError), Progress(3, console=console) as p:
        p.log("[not markup]")
        raise RuntimeError
    assert "[not markup]" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again
