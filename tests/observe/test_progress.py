"""The progress line on a terminal, in a file and in a pipe."""

import io

import pytest
from rich.console import Console

from fewstep.observe.progress import ProgressLine, headlines
from fewstep.observe.wording import duration, number


class Hands:
    """A clock that is set by hand, in seconds."""

    time_s = 1000.0

    def __call__(self) -> float:
        return self.time_s


def plain(**options) -> tuple[ProgressLine, io.StringIO, Hands]:
    file, hands = io.StringIO(), Hands()
    console = Console(file=file, force_terminal=False, width=40)
    return ProgressLine("nano [run]", 20, console=console, now=hands, **options), file, hands


def test_without_a_terminal_whole_lines_come_at_an_interval():
    line, file, hands = plain(interval_s=10.0)
    for iteration in range(1, 8):
        line.update(iteration, {"critic/loss": 0.25, "samples_per_s": 812.4})
        hands.time_s += 4
    assert [text.split(" | ")[0] for text in file.getvalue().splitlines()] == [
        "nano [run] 1/20",
        "nano [run] 4/20",
        "nano [run] 7/20",
    ]
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()


def test_a_line_tells_losses_speed_and_time_left():
    """Four iterations of 3 s since the first one ended, 15 to go: 45 s, whatever the first one took."""
    line, file, hands = plain(interval_s=0.0)
    hands.time_s += 500
    for iteration in range(1, 6):
        line.update(iteration, {"critic/loss": 0.3125, "student/grad_norm": 9.0, "samples_per_s": 812.4})
        hands.time_s += 3
    hands.time_s -= 3
    assert file.getvalue().splitlines()[-1] == "nano [run] 5/20 | 45 s left | 812 samples/s | critic loss 0.3125"


def test_a_resumed_run_counts_on_and_its_time_left_is_its_own():
    line, file, hands = plain(done=10, interval_s=0.0)
    for iteration in (11, 12):
        line.update(iteration)
        hands.time_s += 2
    assert file.getvalue().splitlines() == ["nano [run] 11/20", "nano [run] 12/20 | 16 s left"]


def test_a_phase_shows_at_once_and_ends_with_the_next_iteration():
    line, file, hands = plain(interval_s=10.0)
    line.update(5)
    line.phase("validation")
    hands.time_s += 60
    line.update(6)
    first, second, third = file.getvalue().splitlines()
    assert (first, second) == ("nano [run] 5/20", "nano [run] 5/20 | validation")
    assert "validation" not in third


@pytest.mark.parametrize(("done", "word"), [(20, "finished"), (7, "stopped")])
def test_the_last_line_says_where_the_run_stands_and_what_comes_next(done, word):
    line, file, hands = plain()
    line.update(done)
    hands.time_s += 72
    line.close("Next: fewstep sample runs/nano")
    line.close("again")
    assert file.getvalue().splitlines()[-2:] == [
        f"nano [run]: {word} after {done} of 20 iterations; this session took 1 min 12 s",
        "Next: fewstep sample runs/nano",
    ]


def test_it_writes_to_redirected_standard_output(capsys):
    with ProgressLine("nano", 3) as line:
        line.update(3)
        line.note("Warning: [bold]kept as it is[/bold]")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "nano 3/3"
    assert shown[1] == "Warning: [bold]kept as it is[/bold]"
    assert "finished" in shown[-1]


def test_on_a_terminal_one_live_line_is_redrawn_and_given_back_after_an_error():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, color_system=None)
    line = ProgressLine("nano [run]", 20, console=console)
    assert file.getvalue() == "", "nothing is drawn before the first iteration"

    def fail() -> None:
        with line:
            line.update(12, {"critic/loss": 0.25})
            line.note("Warning: drift")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    shown = file.getvalue()
    assert "12/20 | critic loss 0.25" in shown
    assert "Warning: drift" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"
    assert "stopped after 12 of 20" in shown.splitlines()[-1]


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_keeps_the_name_and_the_time_left(width):
    file, hands = io.StringIO(), Hands()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    values = {"critic/loss": 1.327, "discriminator/loss": 0.6931, "student/dmd_rms": 0.2512, "samples_per_s": 1234.0}
    with ProgressLine("nano-student", 1800, console=console, now=hands) as line:
        for iteration in (100, 101):
            line.update(iteration, values)
            hands.time_s += 2
        line.update(102, values)
    drawn = [text for text in file.getvalue().replace("\r", "\n").splitlines() if "102/1800" in text][-1]
    assert "nano-student " in drawn
    assert "102/1800 | 56 min 36 s left | 1,234 samples/s" in drawn
    assert "…" not in drawn
    assert "student dmd_rms" not in drawn
    assert ("critic loss 1.327" in drawn) == (width == 100)


def test_headlines_prefer_the_gradient_to_a_loss_without_meaning():
    dmd = {"critic/loss": 0.5, "student/loss": -0.01, "student/dmd_rms": 0.25, "student/grad_norm": 3.0}
    assert headlines(dmd) == ["critic loss 0.5", "student dmd_rms 0.25"]
    assert headlines({"student/loss": 0.125}) == ["student loss 0.125"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.34, "2.3 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (72, "1 min 12 s"),
        (3599.6, "1 h 00 min"),
        (11040, "3 h 04 min"),
        (200000, "2 d 8 h"),
        (-1, "?"),
        (float("nan"), "?"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12000.0, "12,000"),
        (0.031234, "0.03123"),
        (2e-4, "2e-4"),
        (1.234e-5, "1.23e-5"),
        (-0.5, "-0.5"),
        (123456.7, "1.23e5"),
        (99999.9, "1e+05"),
        (float("nan"), "NaN"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_read_well(value, text):
    assert number(value) == text
