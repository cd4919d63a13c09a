"""The demo leaves a whole video and its inputs, the same for the same seed, or nothing at all."""

import av
import numpy as np
import pytest
from PIL import Image

from vllm_omni.entrypoints.cli.main import dispatch

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


def _video(folder) -> np.ndarray:
    with av.open(str(folder / "video.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames)


def test_everything_that_the_readme_promises(tmp_path, capsys):
    out = tmp_path / "demo"
    assert dispatch(["demo", "--out", str(out), "--num-frames", "33"]) == 0
    assert _video(out).shape == (33, 64, 96, 3)
    assert {item.name for item in out.iterdir()} == {
        "model", "camera", "first_frame.png", "video.mp4", "contact_sheet.png",
    }  # fmt: skip
    assert np.load(out / "camera" / "glide" / "poses.npy").shape == (33, 4, 4)
    with Image.open(out / "contact_sheet.png") as sheet:
        assert sheet.width > 4 * 96
        assert sheet.height > 3 * 64  # 9 of 33 pixel frames in rows of four
    printed = capsys.readouterr().out
    assert "time to first chunk" in printed
    assert "each further chunk" in printed
    assert "chunk 3/3: 12 pixel frames" in printed
    assert "island" in printed


def test_the_seed_decides(tmp_path):
    """Bitwise: the encoder is deterministic too, so decoded frames are compared."""
    videos = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        line = ["demo", "--out", str(tmp_path / name), "--num-frames", "9", "--seed", seed]
        assert dispatch(line) == 0
        videos[name] = _video(tmp_path / name)
    assert np.array_equal(videos["a"], videos["b"])
    assert not np.array_equal(videos["a"], videos["c"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--num-frames", "10", "9 + 12k"), ("--height", "60", "16"), ("--scene", "beach", "dusk")],
)
def test_bad_options_write_nothing(tmp_path, capsys, option, value, message):
    assert dispatch(["demo", "--out", str(tmp_path / "demo"), option, value]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
