"""Key integration: golden arrays and the rules of the keyboard."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.golden import assert_matches, load_set, requires_golden
from vllm_omni.diffusion.camera_motion import (
    ACTION_KEYS,
    MOVE_STEP,
    PITCH_LIMIT_RAD,
    PITCH_STEP_RAD,
    YAW_STEP_RAD,
    integrate_keys,
    normalise_keys,
)
from vllm_omni.diffusion.models.lingbot_world.camera import reference_intrinsics
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

KEY_SETS = st.frozensets(st.sampled_from(ACTION_KEYS))


def walk(*held, pitch=0.0):
    return integrate_keys([frozenset(keys) for keys in held], np.eye(4), pitch)


@pytest.fixture(scope="module")
def golden():
    return load_set("c_camera")


@requires_golden
def test_held_keys_match_golden(golden):
    """Exact up to one float64 rounding of a norm; the manifest allows 1e-12."""
    facts = golden.manifest["facts"]["actions"]
    for name, fact in facts.items():
        if name == "script":
            continue
        keys = "" if name == "idle" else name
        poses, pitch = walk(*[keys] * 30)
        assert_matches(torch.from_numpy(poses), golden, f"actions.{name}.poses")
        assert pitch == fact["final_pitch_rad"], name


@requires_golden
def test_a_script_in_one_pass_and_by_chunks_matches_golden(golden):
    """Exact up to one float64 rounding of a norm against golden; bitwise between the two walks."""
    script = golden.manifest["facts"]["actions"]["script"]["script"]
    frames = [normalise_keys(keys) for keys in script]
    whole, _ = integrate_keys(frames, np.eye(4), 0.0)
    assert_matches(torch.from_numpy(whole), golden, "actions.script.poses")
    pose, pitch, pitches, parts = np.eye(4), 0.0, [], []
    for first in range(0, len(frames), 3):
        poses, pitch = integrate_keys(frames[first : first + 3], pose, pitch)
        pose = poses[-1]
        parts.append(poses)
        pitches.append(pitch)
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(pitches, golden.arrays["actions.script.pitch_per_chunk"].numpy())


@requires_golden
@pytest.mark.parametrize(("width", "height"), [(96, 64), (832, 480)])
def test_intrinsics_are_bitwise_golden(golden, width, height):
    row = torch.from_numpy(reference_intrinsics(width=width, height=height))
    assert torch.equal(row[None], golden.arrays[f"actions.intrinsics.{width}x{height}"])


def test_each_key_moves_the_way_its_name_says():
    """+X right, +Y down, +Z forward; exact up to the 1e-6 guard of the normalisation."""
    moves = {"w": (0, 0, 1), "s": (0, 0, -1), "d": (1, 0, 0), "a": (-1, 0, 0)}
    for key, direction in moves.items():
        poses, _ = walk(key)
        assert poses[0, :3, 3] == pytest.approx(np.multiply(MOVE_STEP, direction), abs=1e-7)
    forward = {key: walk(key)[0][0, :3, 2] for key in "ijkl"}
    assert forward["l"][0] == pytest.approx(math.sin(YAW_STEP_RAD))
    assert forward["j"][0] == pytest.approx(-math.sin(YAW_STEP_RAD))
    assert forward["i"][1] == pytest.approx(-math.sin(PITCH_STEP_RAD))
    assert forward["k"][1] == pytest.approx(math.sin(PITCH_STEP_RAD))


def test_diagonals_are_not_renormalised():
    poses, _ = walk("wd")
    assert np.linalg.norm(poses[0, :3, 3]) == pytest.approx(MOVE_STEP * math.sqrt(2), rel=1e-5)


def test_pitch_stops_at_84_degrees_and_walking_stays_level():
    poses, pitch = walk(*["wi"] * 40)
    assert math.degrees(pitch) == pytest.approx(84.0)
    assert np.abs(poses[:, 1, 3]).max() == 0.0


@settings(max_examples=60, deadline=None)
@given(st.lists(KEY_SETS, min_size=1, max_size=40))
def test_poses_stay_rigid_and_pitch_within_its_limit(frames):
    """Exact up to reordering: 40 products of rotations, each rounding to 1e-16."""
    poses, pitch = integrate_keys(frames, np.eye(4), 0.0)
    rotations = poses[:, :3, :3]
    assert np.abs(rotations.transpose(0, 2, 1) @ rotations - np.eye(3)).max() < 1e-13
    assert abs(pitch) <= PITCH_LIMIT_RAD
    assert np.array_equal(poses[:, 3], np.tile([0.0, 0.0, 0.0, 1.0], (len(frames), 1)))


@settings(max_examples=60, deadline=None)
@given(st.lists(KEY_SETS, max_size=12), st.lists(KEY_SETS, max_size=12))
def test_integration_in_two_parts_is_bitwise_the_whole(before, after):
    whole, end_pitch = integrate_keys([*before, *after], np.eye(4), 0.0)
    first, pitch = integrate_keys(before, np.eye(4), 0.0)
    second, pitch = integrate_keys(after, first[-1] if before else np.eye(4), pitch)
    assert np.array_equal(whole, np.concatenate([first, second]))
    assert pitch == end_pitch


def test_opposite_keys_cancel():
    poses, pitch = walk("wasdijkl")
    assert np.array_equal(poses[0], np.eye(4))
    assert pitch == 0.0


def test_keys_are_case_insensitive_and_checked():
    assert normalise_keys(["W", "d"]) == frozenset("wd")
    for bad in ("q", "", "wd", "\u0130"):
        with pytest.raises(InvalidRequestError, match="keys are w a s d i j k l"):
            normalise_keys([bad])
