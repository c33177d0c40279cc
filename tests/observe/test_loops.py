"""Loops outside training say how far they are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fewstep.observe.loops import LoopLine, telling
from fewstep.watched import heard_by, watched


class Clock:
    """Goes on by hand."""

    def __init__(self):
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_a_listener_hears_of_every_turn_and_nobody_after_it_has_left():
    heard: list[tuple[str, int, int]] = []
    with heard_by(lambda *told: heard.append(told)):
        assert list(watched("sampling", "ab")) == ["a", "b"]
    assert list(watched("sampling", "abc")) == ["a", "b", "c"]
    assert heard == [("sampling", 0, 2), ("sampling", 1, 2), ("sampling", 2, 2)]


def test_without_a_terminal_the_first_turn_and_then_one_in_ten_seconds_has_a_line():
    file, clock = io.StringIO(), Clock()
    line = LoopLine(Console(file=file, width=200), now=clock)
    for done in range(9):
        line("training the judge", done, 8)
        clock.s += 4.0
    assert file.getvalue().splitlines() == [
        "training the judge 0/8",
        "training the judge 3/8 | 20 s left",
        "training the judge 6/8 | 8 s left",
    ]


def test_on_a_terminal_a_bar_is_drawn_and_taken_away_even_after_an_error():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)

    def broken() -> None:
        with telling(console):
            for turn in watched("sampling", range(5)):
                if turn == 3:
                    raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken()
    assert "sampling" in file.getvalue()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    with telling(console):
        assert list(watched("once more", range(2))) == [0, 1]
    assert "2/2" in file.getvalue()
