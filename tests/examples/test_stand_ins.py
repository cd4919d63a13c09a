"""A program that asks vLLM for a picture by name gets one where vLLM is not installed."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

STAND_INS = Path(__file__).resolve().parents[2] / "examples" / "stand_ins"
NAME = "2560px-Gfp-wisconsin-madison-the-nature-boardwalk"
"""The picture that the public benchmark takes unless it is given another."""
PROGRAM = f"""
import sys
from vllm.assets.base import get_vllm_public_assets
from vllm.assets.image import VLM_IMAGES_DIR, ImageAsset
path = get_vllm_public_assets(filename="{NAME}.jpg", s3_prefix=VLM_IMAGES_DIR)
picture = ImageAsset("{NAME}")
assert picture.pil_image.mode == "RGB"
assert path.read_bytes() == picture.get_path("jpg").read_bytes() == picture.read_bytes("jpg")
assert "torch" not in sys.modules
sys.stdout.buffer.write(path.read_bytes())
"""


def test_a_named_picture_of_vllm():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(STAND_INS)},
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    picture = Image.open(io.BytesIO(done.stdout))
    assert (picture.format, picture.size) == ("JPEG", (832, 480))
    assert picture.getextrema() != ((0, 0),) * 3
