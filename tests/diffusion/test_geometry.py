"""Sizes and frame counts, by hand and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.diffusion.geometry import (
    VideoGeometry,
    chunk_pixel_frames,
    chunks_of,
    pixel_frames_of,
)
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.mark.parametrize(
    ("height", "width", "latent", "tokens"),
    [
        (480, 832, (60, 104), 1560),
        (64, 96, (8, 12), 24),
        (16, 16, (2, 2), 1),
        (464, 832, (58, 104), 1508),
    ],
)
def test_sizes(height, width, latent, tokens):
    geometry = VideoGeometry(height, width)
    assert (geometry.latent_height, geometry.latent_width) == latent
    assert geometry.tokens_per_frame == geometry.token_rows * geometry.token_columns == tokens
    assert str(geometry) == f"{width}x{height}"


@pytest.mark.parametrize("side", [0, -16, 8, 15, 17, 100])
def test_a_side_that_is_no_multiple_of_16_is_named(side):
    with pytest.raises(InvalidRequestError, match=f"height: .*multiple of 16 pixels, got {side}"):
        VideoGeometry(side, 64)
    with pytest.raises(InvalidRequestError, match=f"width: .*multiple of 16 pixels, got {side}"):
        VideoGeometry(64, side)


@given(st.integers(1, 10_000))
def test_chunks_and_pixel_frames_are_inverse(num_chunks):
    assert chunks_of(pixel_frames_of(num_chunks)) == num_chunks


@given(st.integers(1, 60))
def test_chunks_add_up(num_chunks):
    assert sum(map(chunk_pixel_frames, range(num_chunks))) == pixel_frames_of(num_chunks)


@given(st.integers(-50, 500).filter(lambda n: n < 9 or (n - 9) % 12))
def test_other_frame_counts_are_refused(pixel_frames):
    with pytest.raises(InvalidRequestError, match=rf"num_frames: .*got {pixel_frames}; nearest"):
        chunks_of(pixel_frames)
