"""The camera of a live session: golden poses and events, the rules of both modes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.golden import load_set, requires_golden
from vllm_omni.diffusion.camera_motion import CameraMotion, CameraTarget, CameraVelocity
from vllm_omni.diffusion.messages import TokenizedPrompt
from vllm_omni.engine.interactions import ControlEvent, InteractionBox, SteeredCamera

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

IDENTITY = (0.0, 0.0, 0.0, 1.0)
FORWARD = CameraVelocity((0.0, 0.0, 0.05), IDENTITY)


def target(x, y=0.0, z=0.0, yaw=0.0):
    return CameraTarget((x, y, z), (0.0, math.sin(yaw / 2), 0.0, math.cos(yaw / 2)))


def event(name: str, motion: CameraMotion, transition_chunks: int | None = None) -> ControlEvent:
    return ControlEvent(name, camera=motion, transition_chunks=transition_chunks)


def translations(poses: np.ndarray) -> list[list[float]]:
    return poses[:, :3, 3].tolist()


@requires_golden
def test_poses_and_events_match_golden():
    """Exact up to reordering: float64, a product of a dozen rotations, hence 1e-14."""
    facts = load_set("f_end_to_end").manifest["facts"]["facts"]
    motions = {
        "v1": CameraVelocity((0.0, 0.0, 0.05), (0.0, math.sin(0.05), 0.0, math.cos(0.05))),
        "t1": target(0.1),
    }
    # An event that comes with the boundary falls behind the last frame and is clamped to it.
    box = InteractionBox(TokenizedPrompt("a harbour"), live_camera=True, opened_s=0.0)
    for chunk in range(5):
        for name, at in (("v1", 2), ("t1", 3)):
            if chunk == at:
                box.submit(event(name, motions[name]), chunk + 1.0)
        plan, receipt = box.plan("s", chunk, chunk + 1.0)
        expected = np.eye(4)[None] if chunk == 0 else np.array(facts["interact.poses"][chunk - 1])
        np.testing.assert_allclose(plan.poses, np.broadcast_to(expected, (3, 4, 4)), atol=1e-14)
        events = facts["interact.events"][chunk]
        assert list(receipt.started) == events["started"]
        assert list(receipt.active) == events["active"]
        assert list(receipt.completed) == events["completed"]


def test_a_velocity_moves_its_own_frame_and_holds_until_replaced():
    camera = SteeredCamera()
    poses, completed = camera.advance({1: [event("v", FORWARD)]})
    assert translations(poses) == [[0, 0, 0], [0, 0, 0.05], [0, 0, 0.1]]
    assert completed == []
    poses, completed = camera.advance({})
    assert translations(poses)[2] == pytest.approx([0, 0, 0.25])
    assert completed == []
    stop = CameraVelocity((0.0, 0.0, 0.0), IDENTITY)
    poses, completed = camera.advance({0: [event("stop", stop)]})
    assert translations(poses)[2] == pytest.approx([0, 0, 0.25])
    assert completed == ["v"]


def test_a_target_takes_its_chunks_and_lands_exactly():
    camera, goal = SteeredCamera(), target(0.3, yaw=0.6)
    first, completed = camera.advance({0: [event("t", goal, 2)]})
    assert [x for x, _, _ in translations(first)] == pytest.approx([0.05, 0.1, 0.15])
    assert completed == []
    half_way = first[2, :3, 2]
    assert half_way == pytest.approx([math.sin(0.3), 0.0, math.cos(0.3)])
    second, completed = camera.advance({})
    assert translations(second)[2] == [0.3, 0.0, 0.0]  # bitwise: a snap, not a sum
    assert completed == ["t"]
    third, completed = camera.advance({})
    assert np.array_equal(third, np.repeat(second[2:], 3, axis=0))
    assert completed == []


def test_the_shorter_arc_is_taken_whatever_the_sign_of_the_quaternion():
    goal = target(0.0, yaw=0.6)
    negated = CameraTarget(goal.translation, tuple(-component for component in goal.rotation))
    plain, flipped = (
        SteeredCamera().advance({0: [event("t", motion)]})[0] for motion in (goal, negated)
    )
    np.testing.assert_allclose(plain, flipped, atol=1e-15)


def test_no_transition_jumps_on_its_frame():
    poses, completed = SteeredCamera().advance({1: [event("t", target(0.4), 0)]})
    assert [x for x, _, _ in translations(poses)] == [0.0, 0.4, 0.4]
    assert completed == ["t"]


def test_events_of_one_frame_apply_in_order_of_arrival():
    jump, walk = event("jump", target(1.0), 0), event("walk", FORWARD)
    poses, completed = SteeredCamera().advance({0: [walk, jump]})
    assert translations(poses) == [[1, 0, 0]] * 3
    assert completed == ["walk", "jump"]
    poses, completed = SteeredCamera().advance({0: [jump, walk]})
    assert translations(poses)[2] == pytest.approx([1.0, 0.0, 0.15])
    assert completed == ["jump"]


MOTIONS = st.one_of(
    st.builds(target, *[st.floats(-3, 3)] * 4),
    st.builds(lambda z: CameraVelocity((0.0, 0.0, z), IDENTITY), st.floats(-0.1, 0.1)),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 2), st.lists(st.tuples(MOTIONS, st.integers(0, 3)), max_size=3)
        ),
        max_size=6,
    )
)
def test_every_event_ends_at_most_once_and_poses_stay_rigid(chunks):
    """Exact up to reordering: products and blends of rotations, each rounding to 1e-16."""
    camera, ended, serial = SteeredCamera(), [], 0
    for chunk in chunks:
        events: dict[int, list[ControlEvent]] = {}
        for index in sorted(chunk):
            events[index] = []
            for motion, transition_chunks in chunk[index]:
                events[index].append(event(f"e{serial}", motion, transition_chunks))
                serial += 1
        before = camera.pose
        kept = before.copy()
        poses, completed = camera.advance(events)
        assert np.array_equal(before, kept), "a pose that was handed out never changes"
        assert np.array_equal(camera.pose, poses[-1])
        ended += completed
        rotations = poses[:, :3, :3]
        np.testing.assert_allclose(
            rotations.transpose(0, 2, 1) @ rotations, np.tile(np.eye(3), (3, 1, 1)), atol=1e-13
        )
    assert len(set(ended)) == len(ended)
    # All but the latest motion have been replaced or have ended.
    assert set(ended) >= {f"e{index}" for index in range(serial - 1)}
