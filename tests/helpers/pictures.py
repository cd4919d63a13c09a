"""Pictures for tests, and what a refusal of one must look like."""

import io

import numpy as np
import pytest

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.picture import load_image

RNG = np.random.default_rng(11)
NOISE = RNG.integers(0, 256, size=(20, 30, 3), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, size=(20, 30), dtype=np.uint8)
WHITE = 255


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def over_white(rgb, alpha):
    """Float oracle of compositing; the library rounds to nearest, so it may differ by one."""
    share = alpha[..., None] / 255.0
    return rgb * share + WHITE * (1.0 - share)


def refused(source, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        load_image(source)
    assert caught.value.field == "image"
    return str(caught.value)
