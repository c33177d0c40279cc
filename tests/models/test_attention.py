"""The attention function, and masks against the written rule of diffusion forcing and teacher forcing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fewstep.models.attention import Mask, Part, attention, dense, visibility

CPU = torch.device("cpu")


def heads(b: int, n: int, m: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(b, size, 3, 16, dtype=dtype) for size in (n, m, m))


def softmax_attention(q, k, v, visible=None):
    """Written out, one head and one query at a time."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for h in range(q.shape[2]):
                logits = k[b, :, h] @ q[b, n, h] / q.shape[3] ** 0.5
                if visible is not None:
                    logits = logits.masked_fill(~visible[n], -torch.inf)
                out[b, n, h] = logits.softmax(0) @ v[b, :, h]
    return out


def test_attention_is_the_softmax_of_scaled_products():
    q, k, v = heads(2, 5, 7)
    assert torch.allclose(attention(q, k, v), softmax_attention(q, k, v), atol=1e-12)


def forcing_rule(block_frames, window, sink, *, teacher):
    """METHODS section 3, by frame: diffusion forcing, or [clean | noisy] of teacher forcing."""
    starts = [sum(block_frames[:i]) for i in range(len(block_frames))]
    ends = [start + size for start, size in zip(starts, block_frames, strict=True)]
    block = [i for i, size in enumerate(block_frames) for _ in range(size)]
    num = len(block)

    def near(k, i):
        return window is None or k >= ends[i] - (window - sink) or k < sink

    rule = torch.zeros((2 if teacher else 1) * num, (2 if teacher else 1) * num, dtype=torch.bool)
    for q in range(num):
        for k in range(num):
            rule[q, k] = k < ends[block[q]] and near(k, block[q])
            if teacher:
                rule[num + q, k] = k < starts[block[q]] and near(k, block[q])
                rule[num + q, num + k] = block[k] == block[q]
    return rule


BLOCKS = {"frame by frame": (1,) * 6, "threes": (3, 3, 3), "independent first frame": (1, 2, 2, 2), "one block": (4,)}
WINDOWS = [(None, 0), (4, 0), (5, 1), (6, 2)]


def forcing_mask(block_frames, frame_tokens, window=None, sink=0, *, teacher):
    kinds = ("causal", "probe") if teacher else ("causal",)
    parts = tuple(Part(kind, 0, len(block_frames)) for kind in kinds)
    return Mask(block_frames, frame_tokens, parts, num_query_parts=len(parts), window=window, sink=sink)


@pytest.mark.parametrize("block_frames", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize(("window", "sink"), WINDOWS)
@pytest.mark.parametrize("teacher", [False, True], ids=["diffusion forcing", "teacher forcing"])
def test_the_dense_mask_is_the_written_rule(block_frames, window, sink, teacher):
    rule = forcing_rule(block_frames, window, sink, teacher=teacher)
    found = dense(forcing_mask(block_frames, 5, window, sink, teacher=teacher))
    assert torch.equal(found, rule.repeat_interleave(5, 0).repeat_interleave(5, 1))


@pytest.mark.parametrize("block_frames", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize(("window", "sink"), WINDOWS)
def test_blocks_against_a_history_see_what_the_noisy_half_of_teacher_forcing_sees(block_frames, window, sink):
    """Queries of the last blocks alone, against all causal blocks: the rows and columns of the larger mask."""
    last = len(block_frames)
    first = last // 2
    parts = (Part("causal", 0, last), Part("probe", first, last))
    found = dense(Mask(block_frames, 2, parts, window=window, sink=sink))
    rule = forcing_rule(block_frames, window, sink, teacher=True).repeat_interleave(2, 0).repeat_interleave(2, 1)
    num, skipped = 2 * sum(block_frames), 2 * sum(block_frames[:first])
    rows = rule[num + skipped :]
    assert torch.equal(found, torch.cat((rows[:, :num], rows[:, num + skipped :]), dim=1))


def test_a_causal_part_split_in_two_sees_as_the_whole_does():
    whole = dense(forcing_mask((1, 2, 2, 2), 3, 5, 1, teacher=False))
    split = Mask((1, 2, 2, 2), 3, (Part("causal", 0, 2), Part("causal", 2, 4)), window=5, sink=1)
    assert torch.equal(dense(split), whole[9:])


@pytest.mark.parametrize(("num_blocks", "block_tokens"), [(1, 4), (4, 6), (7, 3)])
def test_teacher_forcing_has_twice_the_pairs_of_diffusion_forcing(num_blocks, block_tokens):
    """Invariant 19: block_tokens^2 B (B + 1), and half of it."""
    pairs = block_tokens**2 * num_blocks * (num_blocks + 1)
    assert dense(forcing_mask((1,) * num_blocks, block_tokens, teacher=True)).sum() == pairs
    assert 2 * dense(forcing_mask((1,) * num_blocks, block_tokens, teacher=False)).sum() == pairs


def test_one_block_for_the_whole_clip_is_no_mask():
    """Invariant 15, in the mask: block_frames = F sees everything."""
    assert dense(forcing_mask((4,), 3, teacher=False)).all()


@pytest.mark.parametrize("teacher", [False, True], ids=["diffusion forcing", "teacher forcing"])
def test_masked_attention_is_the_softmax_over_what_is_seen(teacher):
    mask = forcing_mask((1, 2, 2), 2, 3, 1, teacher=teacher)
    q, k, v = heads(2, 20 if teacher else 10, 20 if teacher else 10)
    found = attention(q, k, v, visibility(mask, CPU))
    assert torch.allclose(found, softmax_attention(q, k, v, dense(mask)), atol=1e-12)


def test_what_is_not_seen_has_no_gradient():
    """PITFALLS: masks (the Jacobian to later blocks is exactly 0)."""
    mask = forcing_mask((2, 1, 2), 3, teacher=False)
    q, k, v = (x.requires_grad_() for x in heads(1, 15, 15))
    out = attention(q, k, v, visibility(mask, CPU))
    gradients = torch.autograd.grad(out[:, :6].square().sum(), (k, v), retain_graph=True)
    assert all(not g[:, 6:].any() and g[:, :6].abs().min() > 0 for g in gradients)


@pytest.mark.parametrize(("window", "sink"), WINDOWS)
@pytest.mark.parametrize("num_frames", [127, 128, 129])
def test_the_block_mask_of_the_kernel_is_the_dense_mask(num_frames, window, sink):
    """Invariant 17, in the mask: no tile that a kernel skips holds a pair that is seen, at any count mod 128."""
    mask = forcing_mask((1,) * num_frames, 1, window, sink, teacher=True)
    blocks = visibility(mask, CPU, "flex")
    size = 2 * num_frames
    index = torch.arange(size)
    assert torch.equal(blocks.mask_mod(None, None, index[:, None], index[None, :]), dense(mask))
    num_tiles = -(-size // 128)
    padded = torch.zeros(2 * [128 * num_tiles], dtype=torch.bool)
    padded[:size, :size] = dense(mask)
    tiles = padded.view(num_tiles, 128, num_tiles, 128).any(3).any(1)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), tiles)


@pytest.mark.parametrize("frame_tokens", [1, 37, 128, 200])
@pytest.mark.parametrize("teacher", [False, True], ids=["diffusion forcing", "teacher forcing"])
def test_tiles_found_from_frames_are_those_found_pair_by_pair(frame_tokens, teacher):
    """Against torch's own construction from the dense mask: partial and full tiles, both directions."""
    mask = forcing_mask((1, 2, 2, 2), frame_tokens, 5, 1, teacher=teacher)
    pairs = dense(mask)
    expected = create_block_mask(lambda b, h, q, k: pairs[q, k], None, None, *pairs.shape, device="cpu")
    found = visibility(mask, CPU, "flex")
    for ours, theirs in ((found.to_dense(), expected.to_dense()), (found.sparsity(), expected.sparsity())):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(getattr(found, f"{name}_num_blocks"), getattr(expected, f"{name}_num_blocks"))
        assert torch.equal(getattr(found, f"{name}_indices"), getattr(expected, f"{name}_indices"))
        assert getattr(found, f"{name}_indices").is_contiguous()
    assert found.seq_lengths == expected.seq_lengths


@pytest.mark.thorough  # one size of it, through the network: test_causal.py
def test_the_padded_kernel_equals_the_dense_result(unchecked_shapes):
    """Invariant 17: 129 frames of one token, forward of the compiled kernel on CPU."""
    mask = forcing_mask((1,) * 129, 1, 6, 2, teacher=True)
    q, k, v = heads(2, 258, 258, torch.float32)
    found = attention(q, k, v, visibility(mask, CPU, "flex"))
    assert torch.allclose(found, attention(q, k, v, visibility(mask, CPU)), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_frames", [127, 128, 129])
def test_on_a_gpu_the_kernel_and_its_gradients_equal_the_dense_result(num_frames, unchecked_shapes):
    """Invariant 17, with backward."""
    cuda = torch.device("cuda")
    mask = forcing_mask((1,) * num_frames, 1, 6, 2, teacher=True)
    given = [x.to(cuda).requires_grad_() for x in heads(2, 2 * num_frames, 2 * num_frames, torch.float32)]
    weight = torch.randn_like(given[0])
    results = []
    for kernel in ("flex", "dense"):
        out = attention(*given, visibility(mask, cuda, kernel))
        results.append((out, *torch.autograd.grad((out * weight).sum(), given)))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() < 1e-2 * expected.abs().max()


def test_masks_are_made_once_and_never_mixed_up():
    one, same = forcing_mask((1, 2), 3, teacher=False), forcing_mask((1, 2), 3, teacher=False)
    assert visibility(one, CPU) is visibility(same, CPU)
    assert not torch.equal(visibility(one, CPU), visibility(forcing_mask((2, 1), 3, teacher=False), CPU))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 3, "sink": 2}, "window - sink"),
        ({"sink": 1}, "without a window"),
        ({"parts": (Part("causal", 0, 4),)}, "3 blocks"),
        ({"num_query_parts": 2}, "between 1 and 1"),
    ],
)
def test_masks_that_cannot_be_are_refused(change, words):
    """Invariant 18 and METHODS section 3: a window that cannot hold a block."""
    with pytest.raises(ValueError, match=words):
        Mask(**({"block_frames": (1, 2, 2), "frame_tokens": 2, "parts": (Part("causal", 0, 3),)} | change))
