"""Arrays and tensors as pictures: ranges, types and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.golden import assert_matches, load_set, requires_golden
from tests.helpers.pictures import NOISE, refused
from vllm_omni.inputs.picture import load_image

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@requires_golden
@pytest.mark.parametrize("case", ["u8_0_255", "f_0_1", "f_m1_1", "f_0_1_batched", "bright"])
def test_tensor_ranges_match_golden(case):
    golden = load_set("e_encode_decode")
    chw = golden.arrays["image.small_uint8"].permute(2, 0, 1)
    unit = chw.float() / 255
    source = {
        "u8_0_255": chw,
        "f_0_1": unit,
        "f_m1_1": unit * 2 - 1,
        "f_0_1_batched": unit[None],
        "bright": golden.arrays["image.case.bright_in"],
    }[case]
    loaded = load_image(source)
    if loaded.signed is None:
        signed = torch.from_numpy(loaded.rgb).float() / 255 * 2 - 1
    else:
        signed = torch.from_numpy(loaded.signed)
    assert_matches(signed.permute(2, 0, 1)[None], golden, f"image.case.{case}")


def test_uint8_arrays_are_bitwise_the_pictures():
    for source in (NOISE, NOISE[None], torch.from_numpy(NOISE).permute(2, 0, 1)):
        assert np.array_equal(load_image(source).rgb, NOISE)
    dark = np.ones((4, 4, 3), np.uint8)
    assert np.array_equal(load_image(dark).rgb, dark)  # 1 of 255, not white


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]
)
def test_every_numeric_tensor_type_is_read(dtype):
    source = torch.tensor([0, 64, 255], dtype=dtype)[:, None, None].expand(3, 2, 4)
    expected = np.float32([0, 64, 255]) / np.float32(255) * 2 - 1
    assert load_image(source).signed.shape == (2, 4, 3)
    assert np.array_equal(load_image(source).signed[0, 0], expected)


def test_a_tensor_with_gradients_is_read_and_not_shared():
    source = torch.full((3, 2, 2), -0.5, requires_grad=True)
    loaded = load_image(source).signed
    loaded[:] = 7
    assert source.min() == -0.5
    array = np.full((2, 2, 3), -0.5, np.float32)
    load_image(array).signed[:] = 7
    assert array.max() == -0.5


@settings(max_examples=60, deadline=None)
@given(st.floats(-1, 255, width=32), st.floats(-1, 255, width=32))
def test_ranges_map_into_minus_one_to_one_or_are_refused(first, second):
    source = np.float32([first, second]).reshape(1, 2, 1).repeat(3, axis=2)
    low, high = min(first, second), max(first, second)
    if low < 0 and high > 1:
        refused(source, "needs samples in")
    else:
        signed = load_image(source).signed
        assert np.abs(signed).max() <= 1.0


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (np.zeros((4, 4), np.uint8), r"\[H, W, 3\] or \[1, H, W, 3\], got \[4, 4\]"),
        (np.zeros((4, 4, 4), np.uint8), r"got \[4, 4, 4\]"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"got \[2, 4, 4, 3\]"),
        (torch.zeros(4, 4, 3), r"\[3, H, W\] or \[1, 3, H, W\], got \[4, 4, 3\]"),
        (torch.zeros(1, 1, 3, 4, 4), r"got \[1, 1, 3, 4, 4\]"),
        (torch.zeros(3, 0, 4), "needs at least one pixel, got 4x0"),
        (torch.zeros(1).expand(3, 5000, 5000), "5000x5000 = 25000000"),
        (np.full((2, 2, 3), np.nan), "NaN or infinity"),
        (torch.full((3, 2, 2), torch.inf), "NaN or infinity"),
        (np.full((2, 2, 3), 256.0), r"got \[256, 256\]"),
        (np.full((2, 2, 3), -1.5), r"got \[-1.5, -1.5\]"),
        (np.zeros((2, 2, 3), bool), "needs numbers, got type bool"),
        (torch.zeros(3, 2, 2, dtype=torch.bool), "needs numbers, got type bool"),
        (np.full((2, 2, 3), "a"), "needs numbers, got type"),
    ],
)
def test_arrays_that_are_no_picture_are_refused(source, match):
    refused(source, match)
