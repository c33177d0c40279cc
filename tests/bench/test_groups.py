"""The bench of layouts: what its cases ask for, one of them run at tiny size, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.groups import CASES, FOLLOWED, overrides, parse, result_of, run_case, table, write_folders
from fewstep.cli.shipped import find_recipe
from fewstep.config import load_recipe


@pytest.fixture
def options(tmp_path: Path):
    found = parse(["--tiny", "--repeats", "1", "--folder", str(tmp_path / "folders"), "--out", str(tmp_path / "out")])
    found.out.mkdir()
    write_folders(found, {"1.3B", "14B"})
    return found


def test_every_case_is_a_recipe_and_counts_its_gpus(options):
    gpus = dict.fromkeys(CASES, 2) | {"one": 1, "one-14B": 1}
    for name, case in CASES.items():
        recipe = load_recipe(find_recipe("wan_1_3b_video/self_forcing"), overrides(options, case))
        assert case.gpus == gpus[name]
        assert recipe.data.batch == case.clips
        assert recipe.engine.name == ("ray" if case.groups else "process")
        assert case.clips == 1 or name not in ("one", "one-14B", "sequence")


def test_a_case_is_measured_and_told_beside_the_others(options):
    options.case = "one"
    run_case(options)
    found = json.loads(result_of(options, "one").read_text())
    assert len(found["seconds"]) == 1
    phases = {name.removeprefix("phase/time_s.") for name in found["gauges"] if name.startswith("phase/")}
    assert phases == {"data", "rollout", "critic", "scores", "student"}
    assert sum(found["gauges"][f"phase/time_s.{name}"] for name in phases) <= found["seconds"][0]
    slower = found | {"case": "one-14B", "teacher": "14B", "seconds": [2.0, 4.0], "metrics": {"critic/waiting_s": 0.5}}
    result_of(options, "one-14B").write_text(json.dumps(slower))
    lines = table(options).splitlines()
    assert "critic waits" in lines[2]
    assert "| 14B | 1 | 3 | 3 |" in lines[-1]
    assert lines[-1].endswith("| 0.5 |")
    assert lines[-2].endswith("|  |")


def test_a_case_that_follows_another_is_not_asked_for_alone():
    assert set(FOLLOWED.values()) <= set(CASES)
    with pytest.raises(SystemExit):
        parse(["--only", "overlap"])
