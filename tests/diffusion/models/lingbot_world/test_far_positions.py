"""Positions far into a rollout, with the history that a session has there."""

import pytest
import torch

from tests.helpers.dense_oracle import DenseOracle
from tests.helpers.kv_window import chronological
from tests.helpers.model_builders import (
    ModelRollout,
    chunk_inputs,
    small_transformer,
    text_rows,
    weights_of,
    windowed,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SINK, WINDOW = 4, 10
PROBED = (0, 3, 338, 340, 341, 342, 344, 346)
"""Frames 1014 to 1040 among them: before, across and after frame 1024."""
ROUNDING = {"rtol": 1e-4, "atol": 5e-5}
"""float32 against float64 through two layers: about 2e-6 is seen."""


def test_a_rollout_goes_on_past_frame_1024():
    """Every chunk from the first on is committed; flows and window are the dense oracle's.

    The sink keeps frames 0 to 3, so the distance to them is beyond 1024 at the end. Scattered pages
    hold the bits of an extent.
    """
    config = windowed(SINK, WINDOW)
    with torch.inference_mode():
        extent, scattered = (
            ModelRollout(small_transformer(config), page_tokens=5, scattered=scattered)
            for scattered in (False, True)
        )
        oracle = DenseOracle(weights_of(config), heads=2, sink=SINK, window=WINDOW)
        for chunk in range(PROBED[-1] + 1):
            inputs, start = chunk_inputs(chunk), 3 * chunk
            around = inputs.camera, text_rows(config)
            if chunk in PROBED:
                expected = oracle.forward(inputs.noisy, 937.5, *around, start=start)
                made = extent.probe(chunk)
                torch.testing.assert_close(made.double(), expected, **ROUNDING)
                assert torch.equal(scattered.probe(chunk), made)
            oracle.forward(inputs.clean, 0.0, *around, start=start, commit=True)
            extent.commit(chunk)
            scattered.commit(chunk)
    frames = start + 3
    for layer, committed in enumerate(oracle.committed):
        kept = [*range(SINK), *range(frames - (WINDOW - SINK), frames)]
        for part, array in enumerate(chronological(extent.kv, layer, frames)):
            expected = torch.cat([committed[frame][part] for frame in kept])
            torch.testing.assert_close(array.double(), expected, **ROUNDING)
