"""Camera mathematics: golden arrays and independent oracles."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.golden import assert_matches, load_set, requires_golden
from tests.helpers.rays import path_rays
from vllm_omni.diffusion.camera_motion import quaternion_of
from vllm_omni.diffusion.models.lingbot_world.camera import (
    fold_camera,
    framewise_deltas,
    interpolate_camera_trajectory,
)

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture(scope="module")
def golden():
    return load_set("c_camera")


def rotation_by(rotvec):
    """Rotation about a vector by its length, as a matrix exponential."""
    x, y, z = rotvec
    skew = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    return torch.linalg.matrix_exp(skew).numpy()


def random_path(frames, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4), (frames, 1, 1))
    turns = np.cumsum(rng.normal(scale=0.05, size=(frames, 3)), axis=0)
    poses[:, :3, :3] = [rotation_by(turn) for turn in turns]
    poses[:, :3, 3] = np.cumsum(rng.normal(scale=scale, size=(frames, 3)), axis=0)
    return poses


# --- golden arrays, under the tolerance of the manifest (1e-12 to 2e-6 absolute) ---------------


@requires_golden
@pytest.mark.parametrize("counts", [(33, 9), (45, 12), (69, 18), (81, 21), (5, 17), (2, 7), (9, 9)])
def test_resampled_paths_match_golden(golden, counts):
    source, target = counts
    poses, intrinsics = interpolate_camera_trajectory(
        golden.arrays["src.poses"][:source].numpy(),
        golden.arrays["src.intrinsics"][:source].numpy(),
        target,
    )
    assert_matches(torch.from_numpy(poses), golden, f"interp.{source}_to_{target}.poses")
    assert_matches(torch.from_numpy(intrinsics), golden, f"interp.{source}_to_{target}.intrinsics")


@requires_golden
def test_a_single_frame_is_repeated(golden):
    poses, _ = interpolate_camera_trajectory(
        golden.arrays["src.poses"][:1].numpy(), golden.arrays["src.intrinsics"][:1].numpy(), 4
    )
    assert_matches(torch.from_numpy(poses), golden, "interp.1_to_4.poses")


@requires_golden
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_hard_rotations_match_golden(golden, kind):
    hard = golden.arrays[f"hard.{kind}.poses"].numpy()
    quaternions = np.stack([quaternion_of(pose[:3, :3]) for pose in hard])
    assert_matches(torch.from_numpy(quaternions), golden, f"hard.{kind}.quaternions_wxyz")
    poses, intrinsics = interpolate_camera_trajectory(
        hard, golden.arrays[f"hard.{kind}.intrinsics"].numpy(), 40
    )
    assert_matches(torch.from_numpy(poses), golden, f"hard.{kind}.interp40.poses")
    assert_matches(torch.from_numpy(intrinsics), golden, f"hard.{kind}.interp40.intrinsics")


@requires_golden
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "scale"), [("maxnorm", None), ("unit0p05", 0.05)])
def test_framewise_deltas_match_golden(golden, dtype, name, scale):
    deltas = framewise_deltas(golden.arrays["interp.45_to_12.poses"].to(dtype), scale)
    assert_matches(deltas, golden, f"framewise.{str(dtype).removeprefix('torch.')}.{name}")


@requires_golden
@pytest.mark.parametrize(
    ("name", "frames", "height", "width", "options"),
    [
        ("48x80.f3", 3, 48, 80, {}),
        ("48x80.f3.folded", 3, 48, 80, {}),
        ("64x96.f12.folded", 12, 64, 96, {}),
        ("96x160.f6.unit0p05.folded", 6, 96, 160, {"translation_scale": 0.05}),
        ("48x80_target24x40.f2", 2, 24, 40, {}),  # rays of a size depend on nothing else
        ("32x48.f2.bf16", 2, 32, 48, {"dtype": torch.bfloat16}),
        ("32x48.f2.f64", 2, 32, 48, {"dtype": torch.float64}),
    ],
)
def test_rays_match_golden(golden, name, frames, height, width, options):
    rays = path_rays(
        golden.arrays["interp.45_to_12.poses"][:frames],
        golden.arrays["interp.45_to_12.intrinsics"][:frames],
        height=height,
        width=width,
        **options,
    )
    result = fold_camera(rays)[None] if name.endswith("folded") else rays
    assert_matches(result, golden, f"plucker.{name}")


@requires_golden
def test_a_still_camera_matches_golden(golden):
    rays = path_rays(
        golden.arrays["src.poses"][:1].expand(3, 4, 4),
        golden.arrays["src.intrinsics"][:1].expand(3, 4),
        height=32,
        width=48,
    )
    assert_matches(rays, golden, "plucker.32x48.still3")


# --- independent oracles -----------------------------------------------------------------------


def test_rays_equal_a_per_pixel_computation():
    """Exact up to reordering: float64 on both sides, a few roundings, hence 1e-12."""
    poses = random_path(4, seed=3)
    intrinsics = np.random.default_rng(1).uniform(200, 600, size=(4, 4))
    height, width = 16, 32
    rays = path_rays(
        torch.from_numpy(poses),
        torch.from_numpy(intrinsics),
        height=height,
        width=width,
        dtype=torch.float64,
    ).numpy()
    deltas = [np.eye(4)] + [np.linalg.inv(a) @ b for a, b in pairwise(poses)]
    longest = max(np.linalg.norm(delta[:3, 3]) for delta in deltas)
    for frame, row, column in [(0, 0, 0), (1, 3, 7), (2, 15, 31), (3, 8, 16)]:
        fx, fy, cx, cy = intrinsics[frame] * np.tile([width / 832, height / 480], 2)
        local = np.array([(column + 0.5 - cx) / fx, (row + 0.5 - cy) / fy, 1.0])
        expected = deltas[frame][:3, :3] @ (local / np.linalg.norm(local))
        got = rays[frame, :, row, column]
        np.testing.assert_allclose(got[:3], deltas[frame][:3, 3] / longest, atol=1e-12)
        np.testing.assert_allclose(got[3:], expected / np.linalg.norm(expected), atol=1e-12)


def test_rotations_are_interpolated_along_the_arc():
    """Exact up to reordering: the exponential of a fraction of the known turn, in float64."""
    turns = np.random.default_rng(5).normal(scale=0.7, size=(4, 3))
    poses = np.tile(np.eye(4), (5, 1, 1))
    for index, turn in enumerate(turns):
        poses[index + 1, :3, :3] = poses[index, :3, :3] @ rotation_by(turn)
    resampled, _ = interpolate_camera_trajectory(poses, np.ones((5, 4)), 23)
    for index, position in enumerate(np.linspace(0, 4, 23)):
        left = min(int(position), 3)
        expected = poses[left, :3, :3] @ rotation_by(turns[left] * (position - left))
        np.testing.assert_allclose(resampled[index, :3, :3], expected, atol=1e-12)


def test_folding_puts_pixels_where_the_formula_says():
    """Bitwise: a pure layout move."""
    rays = torch.arange(2 * 6 * 16 * 24, dtype=torch.float32).reshape(2, 6, 16, 24)
    folded = fold_camera(rays)
    assert folded.shape == (384, 2, 2, 3)
    for c, dy, dx, frame, row, column in [
        (0, 0, 0, 0, 0, 0),
        (5, 7, 3, 1, 1, 2),
        (2, 4, 6, 1, 0, 1),
    ]:
        assert (
            folded[c * 64 + dy * 8 + dx, frame, row, column]
            == rays[frame, c, row * 8 + dy, column * 8 + dx]
        )
