"""Decoded video to pixel arrays: the exact order of roundings, for every value."""

import numpy as np
import pytest
import torch

from tests.helpers.golden import load_set, requires_golden
from vllm_omni.diffusion.models.lingbot_world.pixel_output import to_float, to_uint8

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def direct(video: torch.Tensor) -> torch.Tensor:
    """The definition, one operation at a time, each rounded in the dtype it is said to be in."""
    halved = video / 2
    unit = (halved + 0.5).clamp(0, 1)
    return torch.round(unit.float() * 255).to(torch.uint8).permute(1, 2, 3, 0)


def as_video(values: torch.Tensor) -> torch.Tensor:
    """Any number of values as a video of three channels, padded with zeros."""
    columns = -(-values.numel() // (3 * 4))
    padded = torch.zeros(3 * 4 * columns, dtype=values.dtype)
    padded[: values.numel()] = values
    return padded.view(3, 2, 2, columns)


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a 16-bit dtype within [-1.5, 1.5]."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    return values[values.float().abs() <= 1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(dtype: torch.dtype):
    """Bitwise."""
    video = as_video(every_value(dtype))
    assert torch.equal(to_uint8(video), direct(video))


def test_float32_samples_and_ties():
    """Bitwise, ties included: (k + 0.5) / 255 * 2 - 1 lands on or beside half a step."""
    ties = (torch.arange(-2, 258, dtype=torch.float64) + 0.5) / 255 * 2 - 1
    around = [torch.nextafter(ties.float(), torch.tensor(end)) for end in (-9.0, 9.0)]
    samples = torch.linspace(-1.5, 1.5, 100_001)
    video = as_video(torch.cat([ties.float(), *around, samples]))
    assert torch.equal(to_uint8(video), direct(video))


def test_independent_of_the_array_library():
    """Exact: the same float32 operations in NumPy, which rounds half to even as well."""
    video = torch.empty(3, 2, 5, 7).uniform_(-1.3, 1.3, generator=torch.Generator().manual_seed(3))
    values = video.numpy().transpose(1, 2, 3, 0)
    unit = np.clip(values / np.float32(2) + np.float32(0.5), np.float32(0), np.float32(1))
    assert np.array_equal(to_uint8(video).numpy(), np.rint(unit * np.float32(255)).astype(np.uint8))


@pytest.mark.parametrize("piece_elements", [1, 7, 1000, 1 << 30])
def test_pieces_do_not_matter(piece_elements: int):
    """Bitwise, whatever the piece and the memory layout."""
    video = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    channels_last = video.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    expected = direct(video)
    for layout in (video, channels_last):
        output = to_uint8(layout, piece_elements=piece_elements)
        assert torch.equal(output, expected)
        assert output.is_contiguous()


def test_the_video_is_not_written_to():
    video = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    before = video.clone()
    to_uint8(video)
    to_float(video)
    assert torch.equal(video, before)


def test_float_output_is_widened_first():
    video = every_value(torch.bfloat16)
    output = to_float(as_video(video))
    expected = (as_video(video).float() * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
    assert output.dtype == torch.float32
    assert torch.equal(output, expected)
    assert output.is_contiguous()


@requires_golden
def test_golden_pixels():
    golden = load_set("e_encode_decode")
    arrays = golden.arrays
    assert torch.equal(to_uint8(arrays["uint8.ramp_in"][0]), arrays["uint8.ramp"])
    assert torch.equal(to_uint8(arrays["uint8.half_in"][0]), arrays["uint8.half"])
    for chunk in range(3):
        video = arrays[f"decode.stream.chunk{chunk}"][0]
        assert torch.equal(to_uint8(video), arrays[f"uint8.chunk{chunk}"])
    first = arrays["decode.stream.chunk0"][0].bfloat16()
    assert torch.equal(to_uint8(first), arrays["uint8.chunk0_from_bf16"])
    torch.testing.assert_close(
        to_float(arrays["decode.whole"][0])[None], arrays["postprocess.np"], rtol=0, atol=2e-5
    )
