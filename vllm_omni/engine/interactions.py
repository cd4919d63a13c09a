"""Client events, gathered while a chunk is made and folded into the next one's plan.

An event takes effect in the first chunk that is planned after it arrived, at the latent frame
that corresponds to its place in the real time between the two plannings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64

from vllm_omni.diffusion.camera_motion import CameraMotion, CameraTarget
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.messages import ChunkPlan, PromptStep, TokenizedPrompt
from vllm_omni.errors import EventConflictError, InteractionError
from vllm_omni.inputs.interaction import ControlEvent

PROMPT_TRANSITION_CHUNKS = 3
CAMERA_TRANSITION_CHUNKS = 1
MAX_PENDING = 256
"""Events that may wait for one chunk boundary."""
MAX_REPLACED = 16_384
"""Events that may be replaced, unseen, before one chunk boundary."""
MAX_EVENT_IDS = 65_536
"""Latest event ids remembered per session to notice a repeated one."""


@dataclass(frozen=True, slots=True)
class ChunkReceipt:
    """What the events did in one chunk.

    Attributes:
        started: took effect in this chunk.
        active: still running at its end.
        completed: reached their goal or were replaced.
        applied: latent frame of the rollout at which each started event took effect.
    """

    started: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    completed: tuple[str, ...] = ()
    applied: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _ActiveMotion:
    """The motion that moves a camera now.

    Attributes:
        start: pose when the event took effect.
        latent_frames_done: steps taken since then.
        latent_frames: steps that a target takes.
    """

    event_id: str
    motion: CameraMotion
    start: Float64[np.ndarray, "4 4"]
    latent_frames: int
    latent_frames_done: int = 0


class SteeredCamera:
    """The camera of a live session, at the identity before chunk 0.

    Attributes:
        pose: camera-to-world pose of the latest latent frame.
    """

    def __init__(self) -> None:
        self.pose: Float64[np.ndarray, "4 4"] = np.eye(4)
        self._active: _ActiveMotion | None = None

    def advance(
        self, events: Mapping[int, Sequence[ControlEvent]]
    ) -> tuple[Float64[np.ndarray, "3 4 4"], list[str]]:
        """Move through the next chunk.

        Args:
            events: camera events by latent frame of the chunk (0 to 2), each list in order of
                arrival. An event moves the frame that it is placed at already.

        Returns:
            The pose of each latent frame, and the ids of motions that reached their target or
            were replaced.
        """
        poses, completed = [], []
        for index in range(LATENT_FRAMES_PER_CHUNK):
            for event in events.get(index, ()):
                if self._active is not None:
                    completed.append(self._active.event_id)
                completed.extend(self._begin(event))
            completed.extend(self._step())
            poses.append(self.pose)
        return np.stack(poses), completed

    def _begin(self, event: ControlEvent) -> list[str]:
        """Let an event move the camera; returns its id if it has done so at once."""
        assert event.camera is not None, "only camera events move a camera"
        chunks = event.transition_chunks
        chunks = CAMERA_TRANSITION_CHUNKS if chunks is None else chunks
        if isinstance(event.camera, CameraTarget) and chunks <= 0:
            self.pose, self._active = event.camera.matrix(), None
            return [event.event_id]
        self._active = _ActiveMotion(
            event.event_id, event.camera, self.pose, chunks * LATENT_FRAMES_PER_CHUNK
        )
        return []

    def _step(self) -> list[str]:
        """Move by one latent frame; returns the id of a motion that reached its target."""
        active = self._active
        if active is None:
            return []
        if not isinstance(active.motion, CameraTarget):
            self.pose = active.motion.step(self.pose)
            return []
        active.latent_frames_done += 1
        fraction = active.latent_frames_done / active.latent_frames
        self.pose = active.motion.approach(active.start, fraction)
        if fraction < 1.0:
            return []
        self._active = None
        return [active.event_id]


@dataclass(frozen=True, slots=True)
class _PromptTransition:
    event_id: str
    prompt: TokenizedPrompt
    remaining_chunks: int


class InteractionBox:
    """The events of one session that wait for a chunk, or still run.

    Args:
        prompt: the one that the session starts with.
        live_camera: whether camera events are possible; a recorded path or a script excludes
            them.
        opened_s: when the session began.
    """

    def __init__(self, prompt: TokenizedPrompt, *, live_camera: bool, opened_s: float) -> None:
        self._live_camera = live_camera
        self._seen: dict[str, None] = {}
        self._pending: list[tuple[ControlEvent, float]] = []
        self._replaced: list[str] = []
        self._cancelled: list[str] = []
        self._prompt = prompt
        self._transition: _PromptTransition | None = None
        self._camera = SteeredCamera()
        self._boundary_s = opened_s
        self._running: dict[str, frozenset[str]] = {}

    @property
    def prompt(self) -> TokenizedPrompt:
        """The prompt that the world follows, moves towards, or will at the next boundary."""
        waiting = (event.prompt for event, _ in reversed(self._pending))
        return next((prompt for prompt in waiting if prompt is not None), self._prompt)

    def submit(self, event: ControlEvent, now_s: float) -> None:
        """Queue an event for the next chunk boundary.

        When the queue is full, the newest pending event whose every change is made again by a
        later one or by this one is replaced, so that the latest state always arrives.

        Raises:
            EventConflictError: if the id was used before.
            InteractionError: if this session cannot apply it, or too many were replaced already.
        """
        if event.camera is not None and not self._live_camera:
            raise InteractionError(
                "camera events need a session without action_path and camera_action_script",
                field="event.multi_modal_data.camera",
            )
        if event.event_id in self._seen:
            raise EventConflictError(f"event_id {event.event_id!r} was used before in this session")
        if len(self._pending) >= MAX_PENDING:
            self._make_room(event)
        if len(self._seen) >= MAX_EVENT_IDS:
            del self._seen[next(iter(self._seen))]
        self._seen[event.event_id] = None
        self._pending.append((event, now_s))

    def plan(
        self, session_id: str, chunk_index: int, now_s: float
    ) -> tuple[ChunkPlan, ChunkReceipt]:
        """Take all pending events and say what they mean for the chunk that starts now."""
        pending, self._pending = self._pending, []
        replaced, self._replaced = self._replaced, []
        cancelled, self._cancelled = self._cancelled, []
        placed = [(event, self._latent_frame_at(at_s, now_s)) for event, at_s in pending]
        self._boundary_s = now_s
        for event, _ in placed:
            self._running[event.event_id] = event.modalities
        finished = self._take_prompts(event for event, _ in placed)
        step, blended = self._prompt_step()
        poses, moved = self._move_camera(placed)
        completed = self._finished_events([*finished, *blended, *moved])
        first = chunk_index * LATENT_FRAMES_PER_CHUNK
        receipt = ChunkReceipt(
            started=(*replaced, *(event.event_id for event, _ in placed)),
            active=tuple(self._running),
            completed=(*cancelled, *replaced, *completed),
            applied={event.event_id: first + index for event, index in placed},
        )
        return ChunkPlan(session_id, chunk_index, poses=poses, prompt=step), receipt

    def restart(self, prompt: TokenizedPrompt) -> None:
        """Forget camera and transitions; events that wait stay, ids stay taken.

        Events that were running are reported as completed with the next chunk.
        """
        self._prompt = prompt
        self._transition = None
        self._camera = SteeredCamera()
        self._cancelled.extend(self._running)
        self._running.clear()

    def _make_room(self, event: ControlEvent) -> None:
        if len(self._replaced) >= MAX_REPLACED:
            raise InteractionError(
                f"{MAX_PENDING} events wait for the next chunk and {MAX_REPLACED} were replaced "
                "already; send fewer per chunk"
            )
        changed_later = event.modalities
        for index in range(len(self._pending) - 1, -1, -1):
            other, _ = self._pending[index]
            if other.modalities <= changed_later:
                self._replaced.append(other.event_id)
                del self._pending[index]
                return
            changed_later |= other.modalities

    def _latent_frame_at(self, at_s: float, now_s: float) -> int:
        """Latent frame of the coming chunk that the arrival time corresponds to."""
        span = now_s - self._boundary_s
        if span <= 0.0:
            return 0
        fraction = (at_s - self._boundary_s) / span
        return min(max(int(fraction * LATENT_FRAMES_PER_CHUNK), 0), LATENT_FRAMES_PER_CHUNK - 1)

    def _take_prompts(self, events: Iterable[ControlEvent]) -> list[tuple[str, str]]:
        """The last prompt wins; those before it end at once."""
        finished = []
        for event in events:
            if event.prompt is None:
                continue
            if self._transition is not None:
                finished.append((self._transition.event_id, "prompt"))
            chunks = event.transition_chunks
            chunks = PROMPT_TRANSITION_CHUNKS if chunks is None else chunks
            self._prompt = event.prompt
            self._transition = _PromptTransition(event.event_id, event.prompt, max(chunks, 1))
        return finished

    def _prompt_step(self) -> tuple[PromptStep | None, list[tuple[str, str]]]:
        moving = self._transition
        if moving is None:
            return None, []
        step = PromptStep(moving.prompt, 1.0 / moving.remaining_chunks)
        if moving.remaining_chunks == 1:
            self._transition = None
            return step, [(moving.event_id, "prompt")]
        self._transition = replace(moving, remaining_chunks=moving.remaining_chunks - 1)
        return step, []

    def _move_camera(
        self, placed: list[tuple[ControlEvent, int]]
    ) -> tuple[Float64[np.ndarray, "3 4 4"] | None, list[tuple[str, str]]]:
        if not self._live_camera:
            return None, []
        events: dict[int, list[ControlEvent]] = {}
        for event, index in placed:
            if event.camera is not None:
                events.setdefault(index, []).append(event)
        poses, completed = self._camera.advance(events)
        return poses, [(event_id, "camera") for event_id in completed]

    def _finished_events(self, finished: Iterable[tuple[str, str]]) -> list[str]:
        """Ids of events of which no modality is left running."""
        done = []
        for event_id, modality in finished:
            left = self._running.get(event_id, frozenset()) - {modality}
            self._running[event_id] = left
            if not left:
                del self._running[event_id]
                done.append(event_id)
        return done
