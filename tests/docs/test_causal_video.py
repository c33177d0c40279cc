"""The code of the page runs, on the run that its command makes."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.docs.prose import ROOT, blocks
from tests.recipes.tiny_runs import World

WHOLE_RUNS = True


def test_frames_of_your_own_begin_a_clip_and_a_stream(tmp_path, monkeypatch):
    """The frame that is given comes back, and clip and stream go on from it alike, whatever the length."""
    world = World.make(tmp_path / "world")
    teacher = world.train("wan_nano_video/sft", "validation=null", into="teacher", iterations=1)
    given = ("student.causal={block_frames: 4, first_frame_alone: true, window: 9}", "validation=null")
    given = (*given, "method.given_frames=1", "sampling.given_frames=1", f"student.init={teacher.path}")
    (tmp_path / "runs").mkdir()
    run = world.train("wan_nano_video/teacher_forcing", *given, into="given", iterations=1)
    Path(tmp_path / "runs" / "nano-video-given").symlink_to(run.path)
    monkeypatch.chdir(tmp_path)
    (code,) = [block.text for block in blocks(ROOT / "docs" / "causal_video.md") if block.language == "python"]
    found: dict = {}
    exec(code, found)
    assert found["clip"].shape == (1, 9, 1, 16, 16)
    assert torch.equal(found["clip"][:, :1], found["given"])
    sampler, cond, draw = (found[name] for name in ("sampler", "cond", "draw"))
    again = found["Stream"](sampler, found["model"].role, cond, draw, num_blocks=3, given=found["given"])
    assert torch.equal(torch.cat(list(again), 1), found["clip"][:, 1:])
    assert found["frames"].shape == (1, 4, 1, 16, 16)
