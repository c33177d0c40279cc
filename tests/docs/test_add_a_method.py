"""The code of docs/add_a_method.md runs as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fewstep.cli import app
from fewstep.observe.sinks import read_rows
from tests.docs.prose import ROOT, blocks

TINY = [
    "iterations=2",
    "checkpoint.every=2",
    "student.model={family: wan, size: nano, dim: 12, heads: 3, layers: 1, ffn_dim: 16, text_dim: 8, freq_dim: 8, "
    "conditioner: {name: class_label, classes: 2}}",
]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch) -> Path:
    """The files of the page in a folder that is the current one."""
    for block in blocks(ROOT / "docs" / "add_a_method.md"):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Five images in two classes, as an override."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    return f"data={{name: image_folder, path: {tmp_path / 'images'}, size: 8, channels: 1, batch: 3}}"


def fewstep(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_plugin_trains_from_a_teacher_and_its_recipe_is_fine_as_it_stands(lab, data):
    assert "fine (reflow" in fewstep("config", "check", "my_lab/reflow.yaml")
    fewstep("train", str(ROOT / "recipes" / "wan_nano" / "sft.yaml"), *TINY, data, "validation=null")
    fewstep("train", "my_lab/reflow.yaml", *TINY[:2], data)
    rows = read_rows(lab / "runs" / "nano-reflow" / "metrics.jsonl")
    losses = [row.values["student/loss"] for row in rows if row.kind == "train"]
    assert losses
    assert all(0 < loss < 100 for loss in losses)


def test_the_tests_of_the_page_pass(lab):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{lab}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_lab/test_reflow.py"]
    done = subprocess.run(command, cwd=lab, env=environment, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
