"""What is looked at before ranks train together: real ranks, and reports of more ranks than this machine could run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fewstep.engines.health import GIB, Needs, judged, refuse_full_disk
from fewstep.engines.links import Links, network_gb_s
from fewstep.errors import UserError
from tests.engines.test_ranks import started

LINKS = Links(12.0, 0.001, None, "")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """By case and rank: the seconds, and what was found."""
    folder = tmp_path_factory.mktemp("unwell")
    ranks = started("tests.engines.unwell", [str(folder)])
    try:
        ends = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert not list((folder / "run").iterdir()), "the token is gone"
    return {
        case: [(folder / f"{case}-{rank}.txt").read_text().splitlines() for rank in (0, 1)]
        for case in ("well", "recipe", "folder", "memory", "clock")
    }


def test_ranks_that_are_well_are_described_in_one_line(said):
    (_, line, *warnings), (_, other, *_) = said["well"]
    assert not warnings
    assert re.match(
        r"2 ranks on 1 machine: same programs, clocks within \d+ ms, [\d.]+ GiB free on each, sums at", line
    )
    assert float(re.search(r"clocks within (\d+) ms", line)[1]) < 1000  # type: ignore[index]
    assert float(re.search(r"sums at ([\d.]+) GB/s", line)[1]) > 0.01  # type: ignore[index]
    assert other.startswith("2 ranks on 1 machine"), "every rank is told"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("recipe", ["UserErrors: the recipe differs between the ranks", "rank 1 of 2 on", "has b", "most have a"]),
        ("folder", ["UserErrors", "shared folder", "rank 1 of 2 on", "does not see what rank 0 writes", "--run"]),
        ("memory", ["UserErrors: memory", f"{2**60 / GIB:.1f} GiB on each rank", "rank 0 of 2", "GiB free"]),
    ],
)
def test_what_does_not_go_together_is_refused_and_the_rank_named(said, case, words):
    (_, *first), (_, *second) = said[case]
    assert all(word in "\n".join(first) for word in words), first
    assert second == [second[0]]
    assert second[0].startswith("RankError: rank 1 of 2 on")
    assert "what rank 0 says" in second[0]


def test_a_clock_that_is_fast_is_warned_of(said):
    _, line, warning = said["clock"][0]
    assert "clocks within 70" in line
    assert "that of rank 1 of 2" in warning
    assert "by +7.0 s" in warning


def reports(num: int = 5, **odd: object) -> list[dict]:
    """Of so many ranks on two machines, the fourth of which is odd."""
    usual = {"same": {"torch": "2.11.0", "NCCL": "2.27"}, "free": 80 * GIB, "device": "H200", "sees": True}
    made = [
        {"name": f"rank {r} of {num} on {'ab'[r % 2]}", "late_s": 0.001 * r, "shift_s": 0.002, **usual}
        for r in range(num)
    ]
    made[3] |= odd
    return made


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            {"same": {"torch": "2.10.1", "NCCL": "2.27"}},
            ["torch differs", "most have 2.11.0, rank 3 of 5 on b has 2.10.1"],
        ),
        ({"same": {"torch": "2.11.0"}}, ["NCCL differs", "most have 2.27, rank 3 of 5 on b has missing"]),
        ({"free": 40 * GIB}, ["take 50.0 GiB on each rank, rank 3 of 5 on b has 40.0 GiB free"]),
        ({"sees": False}, ["shared folder", "rank 3 of 5 on b does not see"]),
    ],
)
def test_a_rank_that_cannot_take_part_is_an_error(odd, words):
    errors, _, _ = judged(reports(**odd), Needs(memory=50 * GIB, folder=Path("runs/x")), LINKS)
    assert len(errors) == 1
    assert all(word in errors[0] for word in words), errors


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"late_s": -4.0}, ["rank 3 of 5 on b by -4.0 s", "NTP"]),
        ({"free": 55 * GIB}, ["50.0 GiB", "rank 3 of 5 on b has 55.0 GiB free", "little is left"]),
        ({"device": "A100"}, ["H200, A100", "slowest"]),
        ({"shift_s": 0.5}, ["slow links", "2.0 ms between most", "rank 3 of 5 on b (500.0 ms)"]),
    ],
)
def test_what_is_odd_and_works_is_a_warning(odd, words):
    errors, warnings, line = judged(reports(**odd), Needs(memory=50 * GIB), LINKS)
    assert not errors
    assert len(warnings) == 1
    assert all(word in warnings[0] for word in words), warnings
    assert line.startswith("5 ranks on 2 machines: ")
    assert judged(reports(), Needs(memory=50 * GIB), LINKS)[:2] == ([], [])


def test_links_far_below_their_peak_are_warned_of():
    slow, sound = Links(8.0, 0.001, 450.0, "NVLink of H200"), Links(150.0, 0.001, 450.0, "NVLink of H200")
    assert not list(sound.complaints(reports()))
    assert "8 GB/s, far below the 450 of NVLink of H200" in next(slow.complaints(reports()))
    assert str(sound) == "sums at 150 GB/s of at most 450 (NVLink of H200)"


def test_the_rate_of_a_network_is_read_from_its_cards(tmp_path):
    assert network_gb_s(tmp_path) is None
    for place, text in {"net/eth0": "25000", "net/eth1": "-1"}.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "speed").write_text(text + "\n")
    assert network_gb_s(tmp_path) == 25 / 8
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert network_gb_s(tmp_path) == 50


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_training(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert refuse_full_disk(tmp_path / "run", 1000, 2) is None
    with pytest.raises(UserError, match=r"run: a checkpoint takes .* GiB are free; make room, or .* --run"):
        refuse_full_disk(tmp_path / "run", 2 * free, 1)
    warning = refuse_full_disk(tmp_path / "run", free // 2, 2)
    assert warning
    assert "2 are kept while another is written" in warning


def test_fewstep_doctor_looks_at_the_ranks_together(tmp_path: Path):
    ranks: list[subprocess.Popen[str]] = started("fewstep", ["doctor"], HOME=str(tmp_path), COLUMNS="200")
    try:
        first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert re.search(r"ranks\s+ok\s+2 ranks on 1 machine: same programs", first), first
    assert "This machine" not in second
