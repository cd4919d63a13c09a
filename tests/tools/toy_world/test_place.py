"""The renderer against a pinhole camera written down anew, and the walkers in the place."""

import math

import numpy as np
import pytest
import torch

from vllm_omni.diffusion.camera_motion import integrate_keys
from vllm_omni.diffusion.models.lingbot_world.camera import framewise_deltas
from vllm_omni.diffusion.utils.island import (
    EYE,
    FOCAL_AT_REFERENCE,
    LIGHTS,
    PITCH_LIMIT,
    THINGS,
    View,
    blocked,
    render,
)
from vllm_omni.tools.toy_world.walks import (
    Motion,
    Walker,
    chunk_lights,
    random_walk,
    script,
    script_motions,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

DAY = np.array([1.0, 0.0, 0.0])
WHITE_BALL, PURPLE_COLUMN = THINGS[8], THINGS[7]


def _pixel(view: View, x: float, y: float, z: float) -> tuple[int, int]:
    """Row and column in which a pinhole camera sees a point, at 64x96."""
    c, s = math.cos(view.heading), math.sin(view.heading)
    east, north = x - view.x, z - view.z
    right, forward = c * east - s * north, s * east + c * north
    cp, sp = math.cos(view.pitch), math.sin(view.pitch)
    down, ahead = cp * y + sp * forward, cp * forward - sp * y
    row = 32 + 64 * FOCAL_AT_REFERENCE[1] * down / ahead
    return int(row), int(48 + 96 * FOCAL_AT_REFERENCE[0] * right / ahead)


@pytest.mark.parametrize("pitch", [0.0, 0.2, -0.2])
@pytest.mark.parametrize("offset", [-0.3, 0.0, 0.4])
def test_things_are_where_a_pinhole_camera_sees_them(pitch: float, offset: float) -> None:
    thing = PURPLE_COLUMN
    view = View(0.0, 0.0, math.atan2(thing.x, thing.z) + offset, pitch)
    picture = render(view, DAY)
    row, column = _pixel(view, thing.x, EYE - 1.3, thing.z)
    red, green, blue = (int(v) for v in picture[row, column])
    assert green < red < blue  # purple
    # A metre beside it, at the height of the eye, is something else.
    side = math.atan2(thing.x, thing.z) + math.pi / 2
    row, column = _pixel(view, thing.x + math.sin(side), EYE - 1.3, thing.z + math.cos(side))
    if 0 <= column < 96:
        red, green, blue = (int(v) for v in picture[row, column])
        assert not green < red < blue


def test_a_near_thing_hides_a_far_one() -> None:
    near, far = PURPLE_COLUMN, THINGS[0]
    heading = math.atan2(near.x - far.x, near.z - far.z)
    view = View(near.x + 2 * math.sin(heading), near.z + 2 * math.cos(heading), heading + math.pi)
    red, _, blue = (int(v) for v in render(view, DAY)[32, 48])
    assert blue > red


def test_lights_blend_linearly_and_each_has_its_sky() -> None:
    views = [View(0.0, -4.0, 0.3 * k) for k in range(4)]
    for view in views:
        pure = [render(view, light).astype(float) for light in np.eye(3)]
        mixed = render(view, np.array([0.25, 0.25, 0.5]))
        expected = 0.25 * pure[0] + 0.25 * pure[1] + 0.5 * pure[2]
        # Rounding: half a step of the mixture and half of each part.
        assert np.abs(mixed - expected).max() <= 1.0
    skies = [render(views[0], light)[0, 0] for light in np.eye(len(LIGHTS))]
    assert int(skies[0][2]) > 200
    assert int(skies[1][0]) > int(skies[0][0])
    assert int(skies[2].max()) < 100


def test_walkers_stay_out_of_what_is_solid_and_slide_along_it() -> None:
    rng = np.random.default_rng(0)
    walker = Walker.anywhere(rng)
    hits = moves = 0
    for _ in range(400):
        before = (walker.x, walker.z)
        walker.step(Motion(1.0, 0.0, float(rng.uniform(-0.3, 0.3)), float(rng.uniform(-0.1, 0.1))))
        assert not blocked(walker.x, walker.z)
        assert abs(walker.view().pitch) <= PITCH_LIMIT
        hits += walker.hit
        moves += walker.hit and (walker.x, walker.z) != before
    assert hits > 20
    assert moves > 5


def test_deltas_are_the_products_camera_of_the_same_keys() -> None:
    keys = script("w2 wl1 wd3 si3 -3 al2 wk1 d3")
    pose, pitch, expected = np.eye(4), 0.0, []
    for first in range(0, len(keys), 3):
        poses, pitch = integrate_keys(keys[first : first + 3], pose, pitch)
        chain = torch.from_numpy(np.concatenate([pose[None], poses]))
        expected.append(framewise_deltas(chain)[1:].numpy())
        pose = poses[-1]
    wanted = np.concatenate(expected)
    walker = Walker(0.0, 0.0, 0.0)
    made = np.stack([walker.step(motion) for motion in script_motions(keys)])
    np.testing.assert_allclose(made[:, :9], wanted[:, :3, :3].reshape(-1, 9), atol=1e-9)
    # The product's directions are divided by their length plus 1e-6.
    np.testing.assert_allclose(made[:, 9:], wanted[:, :3, 3], atol=2e-6)


def test_a_seed_gives_one_walk_and_every_chunk_ends_in_its_prompts_light() -> None:
    first, again, other = (random_walk(seed, chunks=2) for seed in (4, 4, 5))
    assert np.array_equal(first.frames, again.frames)
    assert np.array_equal(first.deltas, again.deltas)
    assert not np.array_equal(first.frames, other.frames)
    assert first.frames.shape == (21, 64, 96, 3)
    fades = chunk_lights([2, 0], 1)
    assert [len(fade) for fade in fades] == [1, 4, 4, 4, 4, 4]
    assert np.array_equal(fades[0][0], [0, 1, 0])
    assert np.array_equal(fades[2][-1], [0, 0, 1])
    assert np.allclose(fades[1][-1], [0, 0.5, 0.5])
    assert np.array_equal(fades[5][-1], [1, 0, 0])
