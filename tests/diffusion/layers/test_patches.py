"""Patches against a convolution, and the sinusoid against its formula."""

import math

import pytest
import torch
from torch.nn import functional as F

from vllm_omni.diffusion.layers.rope import (
    PatchEmbedding,
    patchify,
    timestep_sinusoid,
    unpatchify,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_patch_embedding_is_a_strided_convolution():
    """Up to the order of the sum."""
    generator = torch.Generator().manual_seed(0)
    embedding = PatchEmbedding(5, 8, torch.float32)
    embedding.weight.copy_(torch.randn(8, 5, 1, 2, 2, generator=generator))
    embedding.bias.copy_(torch.randn(8, generator=generator))
    video = torch.randn(5, 3, 4, 6, generator=generator)
    expected = F.conv3d(video[None], embedding.weight, embedding.bias, stride=(1, 2, 2))[0]
    made = embedding(patchify(video))
    torch.testing.assert_close(made, expected.flatten(2).permute(1, 2, 0), rtol=1e-5, atol=1e-5)


def test_patches_hold_channel_then_row_then_column():
    video = torch.arange(2 * 1 * 2 * 4).reshape(2, 1, 2, 4).float()
    assert patchify(video)[0].tolist() == [
        [0, 1, 4, 5, 8, 9, 12, 13],
        [2, 3, 6, 7, 10, 11, 14, 15],
    ]


def test_outputs_hold_row_then_column_then_channel():
    """The two orders differ: folding and unfolding are not inverse to each other."""
    tokens = torch.arange(2 * 8).reshape(1, 2, 8).float()
    video = unpatchify(tokens, 1, 2)
    assert video.shape == (2, 1, 2, 4)
    assert video[0, 0].tolist() == [[0, 2, 8, 10], [4, 6, 12, 14]]
    assert video[1, 0].tolist() == [[1, 3, 9, 11], [5, 7, 13, 15]]


@pytest.mark.parametrize("dim", [2, 32, 256])
def test_sinusoid_is_cosines_then_sines_in_float64(dim):
    times = torch.tensor([0.0, 1000.0, 937.5, 2500.0 / 3.0, 625.0], dtype=torch.float32)
    made = timestep_sinusoid(times, dim)
    assert made.dtype == torch.float64
    for row, time in zip(made, times.tolist(), strict=True):
        angles = [time / 10000.0 ** (j / (dim // 2)) for j in range(dim // 2)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        torch.testing.assert_close(
            row, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
        )
