"""The interaction camera: golden poses and events, the rules of both modes, payload errors."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.golden import load_set, requires_golden
from vllm_omni.engine.camera_pose import (
    CameraEvent,
    CameraPoseSession,
    CameraTarget,
    CameraVelocity,
    parse_camera_payload,
)
from vllm_omni.errors import InteractionError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

IDENTITY = (0.0, 0.0, 0.0, 1.0)
FORWARD = CameraVelocity((0.0, 0.0, 0.05), IDENTITY)


def target(x, y=0.0, z=0.0, yaw=0.0):
    return CameraTarget((x, y, z), (0.0, math.sin(yaw / 2), 0.0, math.cos(yaw / 2)))


def advance(state, events=None):
    return CameraPoseSession.advance(state, events or {})


def translations(step):
    return step.poses[:, :3, 3].tolist()


@requires_golden
def test_poses_and_events_match_golden():
    """Exact up to reordering: float64, a product of a dozen rotations, hence 1e-14."""
    facts = load_set("f_end_to_end").manifest["facts"]["facts"]
    motions = {
        "v1": CameraVelocity((0.0, 0.0, 0.05), (0.0, math.sin(0.05), 0.0, math.cos(0.05))),
        "t1": target(0.1),
    }
    # One second lies between two boundaries and fps equals the chunk's media frames, so each
    # event falls behind the last frame and is clamped to it: latent frame 2.
    placed = {
        2: {2: [CameraEvent("v1", motions["v1"])]},
        3: {2: [CameraEvent("t1", motions["t1"])]},
    }
    state = CameraPoseSession.fresh()
    for chunk in range(5):
        step = advance(state, placed.get(chunk))
        state = step.state
        expected = np.eye(4)[None] if chunk == 0 else np.array(facts["interact.poses"][chunk - 1])
        np.testing.assert_allclose(step.poses, np.broadcast_to(expected, (3, 4, 4)), atol=1e-14)
        events = facts["interact.events"][chunk]
        assert list(step.started) == events["started"]
        assert list(step.active) == events["active"]
        assert list(step.completed) == events["completed"]


def test_a_velocity_moves_its_own_frame_and_holds_until_replaced():
    first = advance(CameraPoseSession.fresh(), {1: [CameraEvent("v", FORWARD)]})
    assert translations(first) == [[0, 0, 0], [0, 0, 0.05], [0, 0, 0.1]]
    assert (first.started, first.active, first.completed) == (("v",), ("v",), ())
    second = advance(first.state)
    assert translations(second)[2] == pytest.approx([0, 0, 0.25])
    assert (second.started, second.active, second.completed) == ((), ("v",), ())
    stop = CameraVelocity((0.0, 0.0, 0.0), IDENTITY)
    third = advance(second.state, {0: [CameraEvent("stop", stop)]})
    assert translations(third)[2] == pytest.approx([0, 0, 0.25])
    assert (third.started, third.active, third.completed) == (("stop",), ("stop",), ("v",))


def test_a_target_takes_its_chunks_and_lands_exactly():
    goal = target(0.3, yaw=0.6)
    first = advance(CameraPoseSession.fresh(), {0: [CameraEvent("t", goal, transition_chunks=2)]})
    assert [x for x, _, _ in translations(first)] == pytest.approx([0.05, 0.1, 0.15])
    assert (first.active, first.completed) == (("t",), ())
    half_way = first.poses[2, :3, 2]
    assert half_way == pytest.approx([math.sin(0.3), 0.0, math.cos(0.3)])
    second = advance(first.state)
    assert translations(second)[2] == [0.3, 0.0, 0.0]  # bitwise: a snap, not a sum
    assert (second.active, second.completed) == ((), ("t",))
    third = advance(second.state)
    assert np.array_equal(third.poses, np.repeat(second.poses[2:], 3, axis=0))


def test_the_shorter_arc_is_taken_whatever_the_sign_of_the_quaternion():
    goal = target(0.0, yaw=0.6)
    negated = CameraTarget(goal.translation, tuple(-component for component in goal.rotation))
    plain, flipped = (
        advance(CameraPoseSession.fresh(), {0: [CameraEvent("t", motion)]})
        for motion in (goal, negated)
    )
    np.testing.assert_allclose(plain.poses, flipped.poses, atol=1e-15)


def test_no_transition_jumps_on_its_frame():
    step = advance(CameraPoseSession.fresh(), {1: [CameraEvent("t", target(0.4), 0)]})
    assert [x for x, _, _ in translations(step)] == [0.0, 0.4, 0.4]
    assert (step.started, step.active, step.completed) == (("t",), (), ("t",))


def test_events_of_one_frame_apply_in_order_of_arrival():
    jump, walk = CameraEvent("jump", target(1.0), 0), CameraEvent("walk", FORWARD)
    step = advance(CameraPoseSession.fresh(), {0: [walk, jump]})
    assert translations(step) == [[1, 0, 0]] * 3
    assert (step.started, step.active, step.completed) == (("walk", "jump"), (), ("walk", "jump"))
    step = advance(CameraPoseSession.fresh(), {0: [jump, walk]})
    assert translations(step)[2] == pytest.approx([1.0, 0.0, 0.15])
    assert (step.active, step.completed) == (("walk",), ("jump",))


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
def test_every_event_starts_once_and_ends_at_most_once(chunks):
    state, started, ended, serial = CameraPoseSession.fresh(), [], [], 0
    for chunk in chunks:
        events = {}
        for index in sorted(chunk):
            events[index] = []
            for motion, transition_chunks in chunk[index]:
                events[index].append(CameraEvent(f"e{serial}", motion, transition_chunks))
                serial += 1
        before = state.pose.copy()
        step = advance(state, events)
        assert np.array_equal(state.pose, before)  # the old state can be advanced again
        state = step.state
        started += step.started
        ended += step.completed
        assert [name for name in started if name not in ended] == list(step.active)
        rotations = step.poses[:, :3, :3]
        np.testing.assert_allclose(
            rotations.transpose(0, 2, 1) @ rotations, np.tile(np.eye(3), (3, 1, 1)), atol=1e-13
        )
    assert started == [f"e{index}" for index in range(serial)]
    assert len(set(ended)) == len(ended)


def test_an_event_outside_the_chunk_is_refused():
    with pytest.raises(InteractionError, match="latent frames 0 to 2, got 3"):
        advance(CameraPoseSession.fresh(), {3: [CameraEvent("v", FORWARD)]})


def test_payloads_are_read_with_their_defaults():
    assert parse_camera_payload({"data": {}}) == CameraTarget((0.0, 0.0, 0.0), IDENTITY)
    assert parse_camera_payload({"mode": None, "data": {"translation": [1, 2, 3]}}) == CameraTarget(
        (1.0, 2.0, 3.0), IDENTITY
    )
    assert parse_camera_payload({"mode": "absolute", "data": {}}) == CameraTarget(
        (0.0, 0.0, 0.0), IDENTITY
    )
    velocity = parse_camera_payload({"mode": "velocity", "data": {"rotation": [0, 3, 0, 4]}})
    assert velocity == CameraVelocity((0.0, 0.0, 0.0), (0.0, 0.6, 0.0, 0.8))
    tiny = parse_camera_payload({"data": {"rotation": [0, 0, 0, 1e-9]}})
    assert tiny.rotation == IDENTITY


CAMERA = "multi_modal_data.camera"


@pytest.mark.parametrize(
    ("payload", "field", "message"),
    [
        (None, "", "must be an object, got NoneType"),
        ([1], "", "must be an object, got list"),
        ({"mode": "orbit", "data": {}}, ".mode", "got 'orbit'"),
        ({"mode": ["target"], "data": {}}, ".mode", "got \\['target'\\]"),
        ({"mode": "velocity"}, ".data", "got nothing"),
        ({"data": 3}, ".data", "got int"),
        ({"data": {"actions": ["w"]}}, ".data.actions", "keys are not camera data"),
        ({"data": {"translaton": [0, 0, 0]}}, ".data", "unknown key 'translaton'"),
        ({"speed": 1, "data": {}}, "", "unknown key 'speed'"),
        ({"data": {"translation": [0, 0]}}, ".data.translation", "must be 3 numbers, got 2"),
        ({"data": {"translation": "abc"}}, ".data.translation", "3 numbers, got str"),
        ({"data": {"rotation": [0, 0, 1]}}, ".data.rotation", "must be 4 numbers, got 3"),
        ({"data": {"rotation": [0, 0, 0, 0]}}, ".data.rotation", "zero quaternion"),
        ({"data": {"translation": [0, math.nan, 0]}}, ".data.translation", "finite.*got nan"),
        ({"data": {"translation": [0, -math.inf, 0]}}, ".data.translation", "finite.*got -inf"),
        (
            {"data": {"translation": [10**5000, 0, 0]}},
            ".data.translation",
            "1e\\+06, got a larger integer",
        ),
        ({"data": {"translation": [True, 0, 0]}}, ".data.translation", "numbers, got True"),
        ({"data": {"rotation": [0, 0, 0, "1"]}}, ".data.rotation", "numbers, got '1'"),
    ],
)
def test_payloads_that_cannot_be_used_name_their_field(payload, field, message):
    with pytest.raises(InteractionError, match=message) as caught:
        parse_camera_payload(payload)
    assert caught.value.field == f"{CAMERA}{field}"
    assert len(str(caught.value)) < 300
