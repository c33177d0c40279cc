"""The code of docs/add_a_model.md runs as it stands there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from fewstep.flow.sigmas import Uniform
from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.wan.conditioner import ClassLabelSection
from fewstep.records import Batch
from fewstep.rng import Draw
from tests.docs.prose import ROOT, blocks


@pytest.fixture
def family(tmp_path, monkeypatch):
    """The page's folder ``mixer``, importable."""
    for block in blocks(ROOT / "docs" / "add_a_model.md"):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_tests_of_the_page_pass(family):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{family}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mixer/test_mixer.py"]
    done = subprocess.run(command, cwd=family, env=environment, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_network_of_the_page_learns_by_the_methods_of_fewstep(family):
    """Data of one point: the velocity is (x - c) / sigma, far from the zero that a new network predicts."""
    sizes, model = importlib.import_module("mixer.sizes"), importlib.import_module("mixer.model")
    section = sizes.MixerSection(size=8, dim=24, layers=2, conditioner=ClassLabelSection(classes=3))
    network = model.Mixer(section)
    network.initialise(torch.Generator().manual_seed(1))
    method, optimizer = SFT(SFTSection(sigma=Uniform(low=0.2))), torch.optim.Adam(network.parameters(), lr=3e-3)
    key = torch.arange(16)
    cond = network.conditioner.condition(key % 3)
    batch = Batch(key, torch.full((16, 1, 1, 8, 8), 2.0), cond, network.conditioner.null(16))
    losses = []
    for iteration in range(60):
        loss = method.student_losses(network, batch, Draw(0, "student", iteration, key))["student/loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.0, abs=0.5)  # mean of (noise - 2)^2
    assert sum(losses[-5:]) / 5 < 1.2  # 1 is what is left when the point is known and the noise is not
