"""Folding of client events at chunk boundaries."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.diffusion.camera_motion import CameraTarget, CameraVelocity
from vllm_omni.diffusion.messages import PromptStep, TokenizedPrompt
from vllm_omni.engine import interactions
from vllm_omni.engine.interactions import (
    MAX_PENDING,
    MAX_REPLACED,
    ChunkReceipt,
    ControlEvent,
    InteractionBox,
)
from vllm_omni.errors import EventConflictError, InteractionError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

IDENTITY = (0.0, 0.0, 0.0, 1.0)
FORWARD = CameraVelocity((0.0, 0.0, 0.05), IDENTITY)
STILL = CameraVelocity((0.0, 0.0, 0.0), IDENTITY)


def make_box(*, live: bool = True, opened_s: float = 0.0) -> InteractionBox:
    return InteractionBox(TokenizedPrompt("start"), live_camera=live, opened_s=opened_s)


@dataclass(frozen=True)
class Folded:
    poses: np.ndarray | None
    prompt: PromptStep | None
    receipt: ChunkReceipt


def fold(box: InteractionBox, chunk_index: int, now_s: float) -> Folded:
    plan, receipt = box.plan("s", chunk_index, now_s)
    assert (plan.session_id, plan.chunk_index) == ("s", chunk_index)
    return Folded(plan.poses, plan.prompt, receipt)


def travelled(poses: np.ndarray) -> list[float]:
    return [round(float(pose[2, 3]), 6) for pose in poses]


@pytest.mark.parametrize(
    ("at_s", "frame"), [(0.0, 0), (0.2, 0), (0.91, 1), (1.81, 2), (2.5, 2), (2.7, 2)]
)
def test_an_event_is_placed_by_its_fraction_of_the_real_interval(at_s: float, frame: int):
    """A chunk of 2.7 s: arrival times map to thirds of it, not to pixel frames of it."""
    box = make_box()
    box.submit(ControlEvent("e", camera=FORWARD), at_s)
    folded = fold(box, 10, 2.7)
    moved = [0.05 * max(0, index - frame + 1) for index in range(3)]
    assert travelled(folded.poses) == [round(step, 6) for step in moved]
    assert folded.receipt.applied == {"e": 30 + frame}


def test_a_tap_moves_at_least_one_frame_and_its_release_stops():
    box = make_box()
    box.submit(ControlEvent("down", camera=FORWARD), 0.1)
    box.submit(ControlEvent("up", camera=STILL), 0.5)
    folded = fold(box, 0, 1.0)
    assert travelled(folded.poses) == [0.05, 0.05, 0.05]
    assert folded.receipt == ChunkReceipt(("down", "up"), ("up",), ("down",), {"down": 0, "up": 1})


def test_a_held_key_goes_on_until_replaced():
    box = make_box()
    box.submit(ControlEvent("w", camera=FORWARD), 0.0)
    first = fold(box, 0, 1.0)
    second = fold(box, 1, 2.0)
    assert travelled(second.poses) == [0.2, 0.25, 0.3]
    assert (first.receipt.active, second.receipt.active) == (("w",), ("w",))
    assert second.receipt.started == ()


def test_a_prompt_blends_linearly_over_its_chunks():
    """Weights 1/3, 1/2, 1 applied one after the other are a linear blend."""
    box = make_box()
    box.submit(ControlEvent("p", prompt=TokenizedPrompt("night")), 0.0)
    steps = [fold(box, index, float(index + 1)) for index in range(4)]
    weights = [step.prompt.weight for step in steps[:3]]
    assert weights == [1 / 3, 1 / 2, 1.0]
    mixed, path = 0.0, []
    for weight in weights:
        mixed += weight * (1.0 - mixed)
        path.append(mixed)
    assert path == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert steps[3].prompt is None
    assert [step.receipt.completed for step in steps] == [(), (), ("p",), ()]
    assert box.prompt.text == "night"


def test_zero_transition_chunks_switch_at_once():
    box = make_box()
    box.submit(ControlEvent("p", prompt=TokenizedPrompt("night"), transition_chunks=0), 0.0)
    folded = fold(box, 0, 1.0)
    assert folded.prompt.weight == 1.0
    assert folded.receipt.completed == ("p",)


def test_the_last_of_two_prompts_wins_and_both_get_a_receipt():
    box = make_box()
    box.submit(ControlEvent("a", prompt=TokenizedPrompt("rain")), 0.1)
    box.submit(ControlEvent("b", prompt=TokenizedPrompt("snow"), transition_chunks=1), 0.2)
    folded = fold(box, 0, 1.0)
    assert folded.prompt.prompt.text == "snow"
    assert folded.receipt.started == ("a", "b")
    assert set(folded.receipt.completed) == {"a", "b"}


def test_a_composite_event_is_complete_when_both_parts_are():
    box = make_box()
    target = CameraTarget((0.0, 0.0, 0.3), IDENTITY)
    box.submit(
        ControlEvent("c", prompt=TokenizedPrompt("night"), camera=target, transition_chunks=2), 0.0
    )
    receipts = [fold(box, index, float(index + 1)).receipt for index in range(2)]
    assert receipts[0].active == ("c",)
    assert receipts[0].completed == ()
    assert receipts[1].completed == ("c",)


def test_a_repeated_id_is_refused_and_leaves_no_trace():
    box = make_box()
    box.submit(ControlEvent("e", camera=FORWARD), 0.1)
    with pytest.raises(EventConflictError, match="'e'"):
        box.submit(ControlEvent("e", camera=STILL), 0.2)
    assert travelled(fold(box, 0, 1.0).poses) == [0.05, 0.1, 0.15]


def test_camera_events_need_a_live_camera():
    box = make_box(live=False)
    with pytest.raises(InteractionError, match="action_path"):
        box.submit(ControlEvent("e", camera=FORWARD), 0.0)
    box.submit(ControlEvent("e", prompt=TokenizedPrompt("night")), 0.0)
    folded = fold(box, 0, 1.0)
    assert folded.poses is None
    assert folded.prompt is not None


def test_a_release_is_never_lost_in_a_full_queue():
    box = make_box()
    for index in range(10_000):
        motion = FORWARD if index % 2 == 0 else STILL
        box.submit(ControlEvent(f"e{index}", camera=motion), index / 10_000)
    folded = fold(box, 0, 1.0)
    assert len(folded.receipt.applied) == MAX_PENDING
    assert folded.receipt.active == ("e9999",)
    assert travelled(fold(box, 1, 2.0).poses)[0] == travelled(folded.poses)[2]
    ended = {*folded.receipt.completed, *folded.receipt.active}
    assert ended == {f"e{index}" for index in range(10_000)}


def test_a_full_queue_of_one_modality_keeps_its_latest_and_takes_another():
    box = make_box()
    for index in range(MAX_PENDING):
        box.submit(
            ControlEvent(
                f"p{index}", prompt=TokenizedPrompt(f"prompt {index}"), transition_chunks=0
            ),
            0.0,
        )
    box.submit(ControlEvent("c", camera=FORWARD), 0.0)
    folded = fold(box, 0, 1.0)
    assert folded.prompt is not None
    assert folded.prompt.prompt.text == f"prompt {MAX_PENDING - 1}"
    assert travelled(folded.poses) == [0.05, 0.1, 0.15]
    assert len(folded.receipt.applied) == MAX_PENDING
    assert f"p{MAX_PENDING - 2}" in folded.receipt.completed


def test_a_flood_is_refused_and_the_next_chunk_takes_events_again():
    box = make_box()
    for index in range(MAX_PENDING + MAX_REPLACED):
        box.submit(ControlEvent(f"e{index}", camera=FORWARD), 0.0)
    with pytest.raises(InteractionError, match=str(MAX_REPLACED)):
        box.submit(ControlEvent("more", camera=FORWARD), 0.0)
    fold(box, 0, 1.0)
    box.submit(ControlEvent("more", camera=STILL), 1.5)
    assert fold(box, 1, 2.0).receipt.started == ("more",)


def test_a_long_session_forgets_its_oldest_ids_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interactions, "MAX_EVENT_IDS", 2)
    box = make_box()
    for name in ("a", "b", "c"):
        box.submit(ControlEvent(name, camera=FORWARD), 0.0)
    with pytest.raises(EventConflictError):
        box.submit(ControlEvent("b", camera=STILL), 0.1)
    fold(box, 0, 1.0)
    box.submit(ControlEvent("a", camera=STILL), 1.1)
    assert fold(box, 1, 2.0).receipt.started == ("a",)


def test_restart_forgets_motion_and_keeps_what_waits():
    box = make_box()
    box.submit(ControlEvent("w", camera=FORWARD), 0.0)
    fold(box, 0, 1.0)
    box.submit(ControlEvent("l", camera=STILL), 1.2)
    box.restart(TokenizedPrompt("start"))
    folded = fold(box, 0, 2.0)
    assert travelled(folded.poses) == [0.0, 0.0, 0.0]
    assert folded.receipt.completed == ("w",)
    assert folded.receipt.started == ("l",)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=20), st.integers(1, 4))
def test_every_event_starts_once_and_ends_at_most_once(times: list[float], chunks: int):
    box = make_box()
    for index, at_s in enumerate(sorted(times)):
        box.submit(ControlEvent(f"e{index}", camera=FORWARD if index % 2 else STILL), at_s)
    receipts = [fold(box, index, float(index + 1)).receipt for index in range(chunks)]
    started = [event for receipt in receipts for event in receipt.started]
    completed = [event for receipt in receipts for event in receipt.completed]
    assert started == [f"e{index}" for index in range(len(times))]
    assert len(completed) == len(set(completed)) == max(len(times) - 1, 0)
    assert receipts[-1].active == tuple(started[-1:])
