"""What a rollout on device ``cuda`` copies, and that nothing in it waits for the device.

The program of ``tests/helpers/fake_cuda.py`` refuses operands on two devices and copies that wait.
"""

import json
import subprocess
import sys

import pytest

from tests.helpers.fake_cuda import CHUNKS, FIXED
from tests.helpers.tiny import tiny_checkpoint_dir

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(scope="module")
def counted():
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fake_cuda", str(tiny_checkpoint_dir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_chunk_uploads_eight_tensors_at_most_and_downloads_its_pixels(counted):
    """The window grows, rolls, and the prompt changes in between."""
    opening, *chunks = counted
    assert len(chunks) == CHUNKS
    assert "downloads" not in opening
    for chunk in chunks:
        assert 1 <= chunk["uploads"] <= 8
        assert chunk["downloads"] == 1


def test_only_the_search_for_the_fixed_condition_asks_the_device(counted):
    """From then on no chunk waits for anything but its pixels."""
    comparisons = [chunk.get("comparisons", 0) for chunk in counted]
    assert all(comparisons[2 : FIXED + 2])
    assert not any(comparisons[FIXED + 2 :])
