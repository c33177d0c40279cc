"""Rotary positions."""

from __future__ import annotations

import math

import pytest
import torch

from fewstep.models.rope import rotate, rotation, split_head

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("head_dim", "split"), [(128, (44, 42, 42)), (32, (12, 10, 10)), (14, (6, 4, 4)), (4, (4, 0, 0))]
)
def test_a_head_is_split_into_whole_pairs(head_dim, split):
    assert split_head(head_dim) == split
    assert sum(split) == head_dim


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="15"):
        split_head(15)


def test_every_pair_turns_by_its_frequency_times_its_position():
    """The formula, written out token by token and pair by pair."""
    x = torch.randn(2, 2 * 3 * 5, 3, 14, dtype=torch.float64)
    turned = rotate(x, rotation(14, (2, 3, 5), 4, CPU, torch.float64))
    token = 0
    for frame in range(2):
        for row in range(3):
            for column in range(5):
                pair = 0
                for position, components in ((4 + frame, 6), (row, 4), (column, 4)):
                    for i in range(components // 2):
                        angle = position * 10000 ** (-2 * i / components)
                        left, right = x[:, token, :, 2 * pair], x[:, token, :, 2 * pair + 1]
                        c, s = math.cos(angle), math.sin(angle)
                        assert torch.allclose(turned[:, token, :, 2 * pair], left * c - right * s, atol=1e-13)
                        assert torch.allclose(turned[:, token, :, 2 * pair + 1], left * s + right * c, atol=1e-13)
                        pair += 1
                token += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_of_a_clip_has_the_positions_of_the_whole(dtype):
    """Invariant 21, first half, bitwise."""
    whole, part = rotation(14, (9, 2, 3), 0, CPU, dtype), rotation(14, (4, 2, 3), 5, CPU, dtype)
    for full, cut in zip(whole, part, strict=True):
        assert torch.equal(full[5 * 6 : 9 * 6], cut)


def test_logits_do_not_know_where_a_clip_begins():
    """Invariant 21, second half: a common shift of all frames changes no product of a query and a key."""
    q, k = torch.randn(2, 1, 3 * 4, 3, 16, dtype=torch.float64)
    logits = []
    for start in (0, 1, 1000):
        turn = rotation(16, (3, 2, 2), start, CPU, torch.float64)
        logits.append(torch.einsum("bnhe,bmhe->bhnm", rotate(q, turn), rotate(k, turn)))
    assert (logits[0] - torch.einsum("bnhe,bmhe->bhnm", q, k)).abs().max() > 0.1
    assert (logits[1] - logits[0]).abs().max() < 1e-10
    assert (logits[2] - logits[0]).abs().max() < 1e-10


def test_a_position_far_along_a_stream_is_as_exact_as_the_first():
    wide = rotation(16, (2, 1, 1), 1_000_003, CPU, torch.float64)
    narrow = rotation(16, (2, 1, 1), 1_000_003, CPU, torch.float32)
    for exact, rounded in zip(wide, narrow, strict=True):
        assert torch.equal(exact.float(), rounded)


def test_the_form_for_compilers_equals_the_form_for_cpus(monkeypatch):
    x = torch.randn(2, 12, 3, 14, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        turned = rotate(x, rotation(14, (2, 2, 3), 3, CPU, torch.float64))
        results.append((turned, *torch.autograd.grad((turned * weight).sum(), x)))
    for left, right in zip(*results, strict=True):
        assert torch.allclose(left, right, atol=1e-14)


def test_a_table_that_was_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        rotation(6, (1, 1, 7), 11, CPU, torch.float32)
    x = torch.randn(1, 7, 1, 6, requires_grad=True)
    rotate(x, rotation(6, (1, 1, 7), 11, CPU, torch.float32)).sum().backward()
    assert x.grad is not None
