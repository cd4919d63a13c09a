"""Cameras walked chunk by chunk: golden rollouts, equality with the whole clip, ends and errors."""

import numpy as np
import pytest
import torch

from tests.helpers.golden import assert_matches, golden_dir, load_set, requires_golden
from tests.helpers.rays import path_rays
from vllm_omni.diffusion.camera_motion import normalise_keys
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    LiveCamera,
    RecordedCamera,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
    TokenizedPrompt,
)
from vllm_omni.diffusion.models.lingbot_world.camera import (
    create_camera_track,
    fold_camera,
    interpolate_camera_trajectory,
)
from vllm_omni.errors import InternalError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

SMALL = VideoGeometry(64, 96)
BLACK = SourceImage(rgb=np.zeros((16, 16, 3), np.uint8))


def open_track(source, num_chunks, geometry=SMALL, dtype=torch.float32):
    request = SessionRequest(
        prompt=TokenizedPrompt("a harbour"),
        image=BLACK,
        height=geometry.height,
        width=geometry.width,
        num_chunks=num_chunks,
        seed=0,
        camera=source,
    )
    return create_camera_track(request, geometry, dtype=dtype, device=torch.device("cpu"))


def recorded(frames, seed=0, scale=1.0):
    """A path whose translations are those of a fixed walk times ``scale``."""
    rng = np.random.default_rng(seed)
    poses = np.tile(np.eye(4, dtype=np.float32), (frames, 1, 1))
    poses[:, :3, :3] = [turn(0.02 * frame) for frame in range(frames)]
    poses[:, :3, 3] = scale * np.cumsum(rng.normal(size=(frames, 3)), axis=0)
    return RecordedCamera(poses, np.tile(np.float32([500, 501, 416, 240]), (frames, 1)))


def turn(angle):
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def walk(track, count, poses_of=lambda _: None):
    """All chunks of a track side by side along the frame axis."""
    state, chunks = track.fresh(), []
    for index in range(count):
        chunk, state = track.next_chunk(state, ChunkPlan("s", index, poses=poses_of(index)))
        chunks.append(chunk)
    return torch.cat(chunks, dim=1)


@requires_golden
def test_a_live_chunk_matches_golden():
    golden = load_set("c_camera")
    poses = golden.arrays["actions.script.poses"][:3].numpy()
    camera = walk(open_track(LiveCamera(), None), 1, lambda _: poses)
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
    camera = walk(open_track(source, chunks, geometry), chunks)
    assert_matches(camera[None], rollouts, f"{name}.camera")


@requires_golden
def test_a_scripted_rollout_matches_golden():
    rollouts = load_set("f_end_to_end")
    facts = rollouts.manifest["facts"]["facts"]
    script = ScriptedKeys(
        tuple(tuple(normalise_keys(keys) for keys in chunk) for chunk in facts["script"])
    )
    camera = walk(open_track(script, 4), 4)
    assert facts["identical_to"]["step.script.camera"] == "tick.actions.camera"
    assert_matches(camera[None], rollouts, "tick.actions.camera")


@requires_golden
def test_a_live_rollout_matches_golden():
    rollouts = load_set("f_end_to_end")
    later = rollouts.manifest["facts"]["facts"]["interact.poses"]
    poses = [np.tile(np.eye(4), (3, 1, 1)), *(np.array(chunk) for chunk in later[:4])]
    track = open_track(LiveCamera(), 5)
    assert_matches(walk(track, 5, poses.__getitem__)[None], rollouts, "step.interact.camera")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("geometry", [SMALL, VideoGeometry(480, 832)], ids=str)
def test_a_recorded_path_by_chunks_is_bitwise_the_whole_clip(dtype, geometry):
    source = recorded(33)
    poses, intrinsics = interpolate_camera_trajectory(source.poses, source.intrinsics, 9)
    whole = fold_camera(
        path_rays(
            torch.from_numpy(poses),
            torch.from_numpy(intrinsics),
            height=geometry.height,
            width=geometry.width,
            dtype=dtype,
        )
    )
    by_chunks = walk(open_track(source, 3, geometry, dtype), 3)
    assert by_chunks.dtype == dtype
    assert torch.equal(by_chunks, whole)


def test_the_scale_of_a_recorded_path_is_the_clips_and_of_a_script_the_chunks():
    """Recorded and scripted motion is normalised, a live camera moves in controller units."""
    paths = [recorded(21, scale=scale) for scale in (1.0, 10.0, 0.001)]
    small, large, tiny = (walk(open_track(path, 2), 2) for path in paths)
    # Exact up to reordering: the paths differ by a float32 rounding of each coordinate.
    torch.testing.assert_close(small, large, rtol=0, atol=2e-5)
    torch.testing.assert_close(small, tiny, rtol=0, atol=2e-5)
    longest = small[:192].reshape(3, 64, 6, -1)[:, 0, :, 0].norm(dim=0)
    assert longest.max() == pytest.approx(1.0, abs=1e-6)
    assert longest[:3].max() < 1.0 or longest[3:].max() < 1.0

    script = ScriptedKeys(((frozenset("w"),) * 3, (frozenset("w"), frozenset(), frozenset())))
    scripted = walk(open_track(script, 2), 2)
    forward = scripted[2 * 64, :, 0, 0].tolist()
    assert forward == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], abs=1e-6)

    steps = np.tile(np.eye(4), (3, 1, 1))
    steps[:, 2, 3] = [0.05, 0.075, 0.075]
    live = walk(open_track(LiveCamera(), None), 1, lambda _: steps)
    assert live[2 * 64, :, 0, 0].tolist() == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)


def test_a_still_path_is_finite_and_level():
    poses = np.tile(np.eye(4, dtype=np.float32), (9, 1, 1))
    still = RecordedCamera(poses, recorded(9).intrinsics)
    camera = walk(open_track(still, 1), 1)
    assert torch.isfinite(camera).all()
    assert camera[:192].abs().max() == 0


def test_a_step_leaves_the_given_state_alone():
    """A chunk that raises later can be dropped: the same state gives the same chunk, bitwise."""
    keys = frozenset("wil")
    track = open_track(ScriptedKeys(((keys,) * 3,) * 2), 2)
    _, state = track.next_chunk(track.fresh(), ChunkPlan("s", 0))
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
    track = open_track(source, num_chunks)
    with pytest.raises(InternalError, match=message):
        walk(track, 2)


def test_plans_that_do_not_fit_are_refused():
    live = open_track(LiveCamera(), None)
    with pytest.raises(InternalError, match="chunk 0 of a live camera needs three poses"):
        live.next_chunk(live.fresh(), ChunkPlan("s", 0))
    with pytest.raises(InternalError, match="stands before chunk 0, got chunk 4"):
        live.next_chunk(live.fresh(), ChunkPlan("s", 4))
    with pytest.raises(InternalError, match="whole clip"):
        open_track(recorded(9), None)
