"""Camera mathematics: golden arrays, a per-pixel oracle, and chunk-wise use."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.golden import assert_matches, golden_dir, load_set, requires_golden
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import ChunkPlan, LiveCamera, RecordedCamera, ScriptedKeys
from vllm_omni.diffusion.models.lingbot_world.actions import normalise_keys
from vllm_omni.diffusion.models.lingbot_world.camera import (
    RayView,
    build_plucker_embedding,
    fold_camera,
    framewise_deltas,
    open_camera_track,
)
from vllm_omni.diffusion.models.lingbot_world.resample import interpolate_camera_trajectory
from vllm_omni.diffusion.rotation import quaternion_of
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SMALL = VideoGeometry(64, 96)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden():
    return load_set("c_camera")


def view(geometry=SMALL, dtype=torch.float32):
    return RayView(geometry, dtype, CPU)


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


def recorded(frames, seed=0, scale=1.0):
    intrinsics = np.tile(np.float32([500, 501, 416, 240]), (frames, 1))
    return RecordedCamera(random_path(frames, seed, scale).astype(np.float32), intrinsics)


def walk(track, count, poses_of=lambda _: None):
    """All chunks of a track side by side along the frame axis."""
    state, chunks = track.start(), []
    for index in range(count):
        chunk, state = track.next_chunk(state, ChunkPlan("s", index, poses=poses_of(index)))
        chunks.append(chunk)
    return torch.cat(chunks, dim=1)


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
        ("48x80_target24x40.f2", 2, 48, 80, {"target_height": 24, "target_width": 40}),
        ("32x48.f2.bf16", 2, 32, 48, {"dtype": torch.bfloat16}),
        ("32x48.f2.f64", 2, 32, 48, {"dtype": torch.float64}),
    ],
)
def test_rays_match_golden(golden, name, frames, height, width, options):
    rays = build_plucker_embedding(
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
    rays = build_plucker_embedding(
        golden.arrays["src.poses"][:1].expand(3, 4, 4),
        golden.arrays["src.intrinsics"][:1].expand(3, 4),
        height=32,
        width=48,
    )
    assert_matches(rays, golden, "plucker.32x48.still3")


@requires_golden
def test_a_live_chunk_matches_golden(golden):
    poses = golden.arrays["actions.script.poses"][:3].numpy()
    camera = walk(open_camera_track(LiveCamera(), num_chunks=None, view=view()), 1, lambda _: poses)
    assert_matches(camera[None], golden, "latent_aligned.first3.folded")


@requires_golden
@pytest.mark.parametrize(
    ("name", "num_frames", "geometry"),
    [
        ("req.64x96.f45.seed42", 45, SMALL),
        ("req.96x160.f33.seed42", 33, VideoGeometry(96, 160)),
        ("req.64x96.f21.seed1.shift3", 21, SMALL),
    ],
)
def test_recorded_rollouts_match_golden(name, num_frames, geometry):
    rollouts = load_set("f_end_to_end")
    inputs = golden_dir() / "inputs"
    source = RecordedCamera(
        np.load(inputs / "poses.npy")[:num_frames], np.load(inputs / "intrinsics.npy")[:num_frames]
    )
    chunks = 1 + (num_frames - 9) // 12
    camera = walk(open_camera_track(source, num_chunks=chunks, view=view(geometry)), chunks)
    assert_matches(camera[None], rollouts, f"{name}.camera")


@requires_golden
def test_a_scripted_rollout_matches_golden():
    rollouts = load_set("f_end_to_end")
    facts = rollouts.manifest["facts"]["facts"]
    script = ScriptedKeys(
        tuple(tuple(normalise_keys(keys) for keys in chunk) for chunk in facts["script"])
    )
    camera = walk(open_camera_track(script, num_chunks=4, view=view()), 4)
    assert facts["identical_to"]["step.script.camera"] == "tick.actions.camera"
    assert_matches(camera[None], rollouts, "tick.actions.camera")


@requires_golden
def test_a_live_rollout_matches_golden():
    rollouts = load_set("f_end_to_end")
    later = rollouts.manifest["facts"]["facts"]["interact.poses"]
    poses = [np.tile(np.eye(4), (3, 1, 1)), *(np.array(chunk) for chunk in later[:4])]
    track = open_camera_track(LiveCamera(), num_chunks=5, view=view())
    assert_matches(walk(track, 5, poses.__getitem__)[None], rollouts, "step.interact.camera")


# --- independent oracles -----------------------------------------------------------------------


def test_rays_equal_a_per_pixel_computation():
    """Exact up to reordering: float64 on both sides, a few roundings, hence 1e-12."""
    poses = random_path(4, seed=3)
    intrinsics = np.random.default_rng(1).uniform(200, 600, size=(4, 4))
    height, width = 16, 32
    rays = build_plucker_embedding(
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


# --- chunk-wise use ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("geometry", [SMALL, VideoGeometry(480, 832)], ids=str)
def test_a_recorded_path_by_chunks_is_bitwise_the_whole_clip(dtype, geometry):
    source = recorded(33)
    poses, intrinsics = interpolate_camera_trajectory(source.poses, source.intrinsics, 9)
    whole = fold_camera(
        build_plucker_embedding(
            torch.from_numpy(poses),
            torch.from_numpy(intrinsics),
            height=geometry.height,
            width=geometry.width,
            dtype=dtype,
        )
    )
    by_chunks = walk(open_camera_track(source, num_chunks=3, view=view(geometry, dtype)), 3)
    assert by_chunks.dtype == dtype
    assert torch.equal(by_chunks, whole)


def test_the_scale_of_a_recorded_path_is_the_clips_and_of_a_script_the_chunks():
    """Recorded and scripted motion is normalised, a live camera moves in controller units."""
    paths = [recorded(21, scale=scale) for scale in (1.0, 10.0, 0.001)]
    small, large, tiny = (
        walk(open_camera_track(path, num_chunks=2, view=view()), 2) for path in paths
    )
    # Exact up to reordering: the paths differ by a float32 rounding of each coordinate.
    torch.testing.assert_close(small, large, rtol=0, atol=2e-5)
    torch.testing.assert_close(small, tiny, rtol=0, atol=2e-5)
    longest = small[:192].reshape(3, 64, 6, -1)[:, 0, :, 0].norm(dim=0)
    assert longest.max() == pytest.approx(1.0, abs=1e-6)
    assert longest[:3].max() < 1.0 or longest[3:].max() < 1.0

    script = ScriptedKeys(((frozenset("w"),) * 3, (frozenset("w"), frozenset(), frozenset())))
    scripted = walk(open_camera_track(script, num_chunks=2, view=view()), 2)
    forward = scripted[2 * 64, :, 0, 0].tolist()
    assert forward == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], abs=1e-6)

    steps = np.tile(np.eye(4), (3, 1, 1))
    steps[:, 2, 3] = [0.05, 0.075, 0.075]
    live = walk(open_camera_track(LiveCamera(), num_chunks=None, view=view()), 1, lambda _: steps)
    assert live[2 * 64, :, 0, 0].tolist() == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


def test_a_still_path_is_finite_and_level():
    poses = np.tile(np.eye(4, dtype=np.float32), (9, 1, 1))
    still = RecordedCamera(poses, recorded(9).intrinsics)
    camera = walk(open_camera_track(still, num_chunks=1, view=view()), 1)
    assert torch.isfinite(camera).all()
    assert camera[:192].abs().max() == 0


def test_a_step_leaves_the_given_state_alone():
    """A chunk that raises later can be dropped: the same state gives the same chunk, bitwise."""
    keys = frozenset("wil")
    track = open_camera_track(ScriptedKeys(((keys,) * 3,) * 2), num_chunks=2, view=view())
    _, state = track.next_chunk(track.start(), ChunkPlan("s", 0))
    pose = state.pose.copy()
    first, _ = track.next_chunk(state, ChunkPlan("s", 1))
    again, after = track.next_chunk(state, ChunkPlan("s", 1))
    assert torch.equal(first, again)
    assert np.array_equal(state.pose, pose)
    assert after.pitch_rad == pytest.approx(np.radians(24))


@pytest.mark.parametrize(
    ("source", "num_chunks", "message"),
    [
        (recorded(9), 1, "has 1 chunks, got chunk 1"),
        (ScriptedKeys(((frozenset(),) * 3,)), 1, "has 1 chunks, got chunk 1"),
    ],
    ids=["recorded", "script"],
)
def test_a_source_that_has_ended_refuses(source, num_chunks, message):
    track = open_camera_track(source, num_chunks=num_chunks, view=view())
    with pytest.raises(InvalidRequestError, match=message):
        walk(track, 2)


def test_plans_that_do_not_fit_are_refused():
    live = open_camera_track(LiveCamera(), num_chunks=None, view=view())
    with pytest.raises(InvalidRequestError, match="chunk 0 of a live camera needs three poses"):
        live.next_chunk(live.start(), ChunkPlan("s", 0))
    with pytest.raises(InvalidRequestError, match="stands before chunk 0, got chunk 4"):
        live.next_chunk(live.start(), ChunkPlan("s", 4))
    with pytest.raises(InvalidRequestError, match="whole clip"):
        open_camera_track(recorded(9), num_chunks=None, view=view())
