"""The page's camera arithmetic against the product's own, in the browser's JavaScript."""

import numpy as np
import pytest

from tests.web.browser import MARKS, browser, server, visit, visit_with
from vllm_omni.diffusion.camera_motion import integrate_keys
from vllm_omni.engine.interactions import ControlEvent, SteeredCamera
from vllm_omni.inputs.interaction import parse_camera_payload

__all__ = ["browser", "server", "visit", "visit_with"]

pytestmark = MARKS

SEQUENCES = {
    "walk": ["w"] * 6 + ["sa"] * 6 + ["d"] * 3,
    "turn while walking": ["wl"] * 9 + ["wj"] * 6 + ["al"] * 3,
    "level horizon while looking up": ["i"] * 6 + ["l"] * 6 + ["w"] * 3 + ["kj"] * 6 + ["wd"] * 3,
    "stop below the zenith": ["i"] * 30 + ["wl"] * 6,
    "opposite keys": ["ws"] * 3 + ["jl"] * 3 + ["ikw"] * 3,
}
# One velocity and its pose per latent frame, the velocity recomputed for the pose of the frame.
WALK = """async (frames) => {
  const { Pose, velocityOf } = await import("/static/motion.js");
  const pose = new Pose();
  const sign = (held, plus, minus) => held.includes(plus) - held.includes(minus);
  return frames.map((held) => {
    const velocity = velocityOf({
      forward: sign(held, "w", "s"), right: sign(held, "d", "a"),
      yaw: sign(held, "l", "j"), pitch: sign(held, "i", "k"),
    }, pose.pitch);
    pose.advance(velocity);
    return { velocity, position: pose.position, heading: pose.heading, pitch: pose.pitch };
  });
}"""


@pytest.mark.parametrize("name", SEQUENCES)
def test_keys_move_the_camera_as_recorded_keys_do(visit, name):
    """Equal up to the six digits on the wire and the pitch steps of 0.001, per latent frame."""
    frames = SEQUENCES[name]
    walked = visit.page.evaluate(WALK, frames)
    expected, _ = integrate_keys([frozenset(held) for held in frames], np.eye(4), 0.0)
    tolerance = 6e-4 * len(frames) ** 0.5
    for step, pose in zip(walked, expected, strict=True):
        assert step["position"] == pytest.approx(pose[:3, 3], abs=tolerance)
        ahead = pose[:3, 2]
        assert step["pitch"] == pytest.approx(np.arcsin(-ahead[1]), abs=tolerance)
        turn = step["heading"] - np.arctan2(ahead[0], ahead[2])
        assert np.sin(turn) == pytest.approx(0, abs=6 * tolerance)


def test_path_of_the_page_is_the_path_of_the_server(visit):
    """The server walks the very payloads; equal up to double rounding."""
    frames = SEQUENCES["level horizon while looking up"]
    walked = visit.page.evaluate(WALK, frames)
    camera = SteeredCamera()
    for first in range(0, len(frames), 3):
        events = {
            index: [
                ControlEvent(
                    str(first + index),
                    camera=parse_camera_payload(
                        {"mode": "velocity", "data": walked[first + index]["velocity"]}
                    ),
                )
            ]
            for index in range(3)
        }
        poses, _ = camera.advance(events)
        for index, pose in enumerate(poses):
            # Both renormalise quaternions of six digits, at different places.
            position = walked[first + index]["position"]
            assert position == pytest.approx(pose[:3, 3], abs=1e-6)


def test_positions_of_latent_frames_in_pixel_frames(visit):
    offsets = visit.page.evaluate(
        """async () => {
          const { pixelFramesBefore } = await import("/static/camera_path.js");
          return [9, 12].map((frames) => [0, 1, 2].map((k) => pixelFramesBefore(k, frames)));
        }"""
    )
    assert offsets == [[0, 1, 5], [0, 4, 8]]
