"""Rotary tables and their application, against complex numbers."""

import pytest
import torch

from vllm_omni.diffusion.layers.rope import BROADCAST, RotaryEmbeddingWan, RotaryTables

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CPU = torch.device("cpu")


def tables(head_dim, start=0, frames=3, rows=2, columns=3, dtype=torch.float32):
    return RotaryEmbeddingWan(head_dim).tables(
        start_latent_frame=start, latent_frames=frames, rows=rows, columns=columns, dtype=dtype,
        device=CPU,
    )  # fmt: skip


def angles(head_dim, position):
    """Angle of every pair of one token, axis after axis."""
    side = 2 * (head_dim // 6)
    return torch.tensor([
        place / 10000.0 ** (2 * pair / dim)
        for place, dim in zip(position, (head_dim - 2 * side, side, side), strict=True)
        for pair in range(dim // 2)
    ], dtype=torch.float64)  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "dims"),
    [(128, (44, 42, 42)), (16, (8, 4, 4)), (32, (12, 10, 10)), (6, (2, 2, 2)), (64, (24, 20, 20))],
)
def test_axes_share_the_head_out(head_dim, dims):
    assert RotaryEmbeddingWan(head_dim).axis_dims == dims


@pytest.mark.parametrize("head_dim", [6, 16, 32, 128])
@pytest.mark.parametrize("start", [0, 3, 1023, 100_000, 30 * 24 * 3600 * 4])
def test_each_token_has_the_angles_of_its_place(head_dim, start):
    """To one float32 rounding; the temporal place is absolute, rows and columns restart."""
    made, token = tables(head_dim, start), 0
    for frame in range(start, start + 3):
        for row in range(2):
            for column in range(3):
                expected = angles(head_dim, (frame, row, column))
                close = {"rtol": 0, "atol": 6e-8}
                torch.testing.assert_close(made.cos[token].double(), expected.cos(), **close)
                torch.testing.assert_close(made.sin[token].double(), expected.sin(), **close)
                token += 1
    assert made.cos.shape == (token, head_dim // 2)


def test_low_precision_is_rounded_from_float32():
    """Bitwise: angles never see the model's dtype."""
    wide, narrow = tables(16, 1023), tables(16, 1023, dtype=torch.bfloat16)
    assert torch.equal(narrow.cos, wide.cos.bfloat16())
    assert torch.equal(narrow.sin, wide.sin.bfloat16())


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_pairs_are_turned_like_complex_numbers(heads):
    """Up to rounding: interleaved pairs, the same turn for every head."""
    made = tables(16)
    x = torch.randn(18, heads, 16, generator=torch.Generator().manual_seed(0))
    turn = torch.complex(made.cos, made.sin)[:, None, :]
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * turn).flatten(-2)
    torch.testing.assert_close(BROADCAST.rotate(x, made), expected, rtol=1e-6, atol=1e-6)


def test_heads_are_turned_alike():
    """Bitwise: tables are broadcast over heads."""
    made = tables(16)
    x = torch.randn(18, 4, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([BROADCAST.rotate(head, made) for head in x.split(1, dim=1)], dim=1)
    assert torch.equal(BROADCAST.rotate(x, made), alone)


def test_turning_there_and_back_is_the_identity():
    """Up to rounding."""
    made = tables(16, 500)
    x = torch.randn(18, 2, 16, generator=torch.Generator().manual_seed(2))
    back = BROADCAST.rotate(BROADCAST.rotate(x, made), RotaryTables(made.cos, -made.sin))
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


def test_scores_depend_on_the_distance_in_time_alone():
    """Up to rounding: that is what lets keys be cached after rotation."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(1, 1, 16, generator=generator) for _ in range(2))
    one = {"frames": 1, "rows": 1, "columns": 1}
    scores = []
    for start in (0, 40, 1020):
        turned = BROADCAST.rotate(query, tables(16, start + 7, **one))
        scores.append((turned * BROADCAST.rotate(key, tables(16, start, **one))).sum())
    torch.testing.assert_close(scores[1:], [scores[0]] * 2, rtol=1e-4, atol=1e-5)
