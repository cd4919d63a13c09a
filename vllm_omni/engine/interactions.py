"""Client events, gathered while a chunk is made and folded into the next one's plan.

An event takes effect in the first chunk that is planned after it arrived, at the latent frame
that corresponds to its place in the real time between the two plannings.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.messages import PromptStep
from vllm_omni.engine.camera_pose import (
    DEFAULT_TRANSITION_CHUNKS as CAMERA_TRANSITION_CHUNKS,
)
from vllm_omni.engine.camera_pose import (
    CameraEvent,
    CameraMotion,
    CameraPoseSession,
    CameraPoseState,
)
from vllm_omni.errors import EventConflictError, InteractionError

PROMPT_TRANSITION_CHUNKS = 3
MAX_PENDING = 256
"""Events that may wait for one chunk boundary."""
MAX_REPLACED = 16_384
"""Events that may be replaced, unseen, before one chunk boundary."""
MAX_EVENT_IDS = 65_536
"""Latest event ids remembered per session to notice a repeated one."""


@dataclass(frozen=True, slots=True)
class Interaction:
    """A validated client event: a prompt, a camera motion, or both at once.

    Attributes:
        transition_chunks: ``None`` for the default of each modality.
    """

    event_id: str
    prompt: str | None = None
    camera: CameraMotion | None = None
    transition_chunks: int | None = None

    @property
    def modalities(self) -> frozenset[str]:
        """What the event changes."""
        parts = {"prompt": self.prompt, "camera": self.camera}
        return frozenset(name for name, value in parts.items() if value is not None)


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


@dataclass(frozen=True, slots=True)
class FoldedChunk:
    """Everything that interactions say about one chunk."""

    poses: Float64[np.ndarray, "3 4 4"] | None
    prompt: PromptStep | None
    receipt: ChunkReceipt


@dataclass(frozen=True, slots=True)
class _PromptTransition:
    event_id: str
    prompt: str
    remaining_chunks: int


@dataclass(frozen=True, slots=True)
class _Arrived:
    interaction: Interaction
    at_s: float


class InteractionBox:
    """Events of one session. Submitting and folding may happen on different threads.

    Args:
        prompt: the one that the session starts with.
        live_camera: whether camera events are possible; a recorded path or a script excludes
            them.
        opened_s: when the session began.
    """

    def __init__(self, prompt: str, *, live_camera: bool, opened_s: float) -> None:
        self._lock = threading.Lock()
        self._live_camera = live_camera
        self._seen: dict[str, None] = {}
        self._pending: list[_Arrived] = []
        self._replaced: list[str] = []
        self._cancelled: list[str] = []
        self._prompt = prompt
        self._transition: _PromptTransition | None = None
        self._camera = CameraPoseSession.fresh()
        self._boundary_s = opened_s
        self._open_parts: dict[str, frozenset[str]] = {}

    @property
    def prompt(self) -> str:
        """The prompt that the world follows, moves towards, or will at the next boundary."""
        with self._lock:
            waiting = (item.interaction.prompt for item in reversed(self._pending))
            return next((prompt for prompt in waiting if prompt is not None), self._prompt)

    def submit(self, interaction: Interaction, now_s: float) -> None:
        """Queue an event for the next chunk boundary.

        When the queue is full, the newest pending event whose every change is made again by a
        later one or by this one is replaced, so that the latest state always arrives.

        Raises:
            EventConflictError: if the id was used before.
            InteractionError: if this session cannot apply it, or too many were replaced already.
        """
        if interaction.camera is not None and not self._live_camera:
            raise InteractionError(
                "camera events need a session without action_path and camera_action_script",
                field="event.multi_modal_data.camera",
            )
        with self._lock:
            if interaction.event_id in self._seen:
                raise EventConflictError(
                    f"event_id {interaction.event_id!r} was used before in this session"
                )
            if len(self._pending) >= MAX_PENDING:
                self._make_room(interaction)
            if len(self._seen) >= MAX_EVENT_IDS:
                del self._seen[next(iter(self._seen))]
            self._seen[interaction.event_id] = None
            self._pending.append(_Arrived(interaction, now_s))

    def fold(self, first_latent_frame: int, now_s: float) -> FoldedChunk:
        """Take all pending events and say what they mean for the chunk that starts now."""
        with self._lock:
            arrived, self._pending = self._pending, []
            replaced, self._replaced = self._replaced, []
            cancelled, self._cancelled = self._cancelled, []
            placed = [(item.interaction, self._place(item.at_s, now_s)) for item in arrived]
            self._boundary_s = now_s
            for interaction, _ in placed:
                self._open_parts[interaction.event_id] = interaction.modalities
            finished = self._fold_prompts(placed)
            step, done = self._prompt_step()
            finished += done
            poses, camera_done = self._fold_camera(placed)
            finished += camera_done
            completed = [*cancelled, *replaced, *self._close_parts(finished)]
            receipt = ChunkReceipt(
                started=(*replaced, *(interaction.event_id for interaction, _ in placed)),
                active=tuple(self._open_parts),
                completed=tuple(completed),
                applied={
                    interaction.event_id: first_latent_frame + index
                    for interaction, index in placed
                },
            )
            return FoldedChunk(poses, step, receipt)

    def restart(self, prompt: str) -> None:
        """Forget camera and transitions; events that wait stay, ids stay taken.

        Events that were running are reported as completed with the next chunk.
        """
        with self._lock:
            self._prompt = prompt
            self._transition = None
            self._camera = CameraPoseSession.fresh()
            self._cancelled.extend(self._open_parts)
            self._open_parts.clear()

    def _make_room(self, interaction: Interaction) -> None:
        if len(self._replaced) >= MAX_REPLACED:
            raise InteractionError(
                f"{MAX_PENDING} events wait for the next chunk and {MAX_REPLACED} were replaced "
                "already; send fewer per chunk"
            )
        changed_later = interaction.modalities
        for index in range(len(self._pending) - 1, -1, -1):
            other = self._pending[index].interaction
            if other.modalities <= changed_later:
                self._replaced.append(other.event_id)
                del self._pending[index]
                return
            changed_later |= other.modalities

    def _place(self, at_s: float, now_s: float) -> int:
        """Latent frame of the coming chunk that the arrival time corresponds to."""
        span = now_s - self._boundary_s
        if span <= 0.0:
            return 0
        fraction = (at_s - self._boundary_s) / span
        return min(max(int(fraction * LATENT_FRAMES_PER_CHUNK), 0), LATENT_FRAMES_PER_CHUNK - 1)

    def _fold_prompts(self, placed: list[tuple[Interaction, int]]) -> list[tuple[str, str]]:
        """The last prompt wins; those before it end at once."""
        finished = []
        for interaction, _ in placed:
            if interaction.prompt is None:
                continue
            if self._transition is not None:
                finished.append((self._transition.event_id, "prompt"))
            chunks = interaction.transition_chunks
            chunks = PROMPT_TRANSITION_CHUNKS if chunks is None else chunks
            self._prompt = interaction.prompt
            self._transition = _PromptTransition(
                interaction.event_id, interaction.prompt, max(chunks, 1)
            )
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

    def _fold_camera(
        self, placed: list[tuple[Interaction, int]]
    ) -> tuple[Float64[np.ndarray, "3 4 4"] | None, list[tuple[str, str]]]:
        if not self._live_camera:
            return None, []
        events: dict[int, list[CameraEvent]] = {}
        for interaction, index in placed:
            if interaction.camera is None:
                continue
            chunks = interaction.transition_chunks
            chunks = CAMERA_TRANSITION_CHUNKS if chunks is None else chunks
            event = CameraEvent(interaction.event_id, interaction.camera, chunks)
            events.setdefault(index, []).append(event)
        advance = CameraPoseSession.advance(self._camera, events)
        self._camera: CameraPoseState = advance.state
        return advance.poses, [(event_id, "camera") for event_id in advance.completed]

    def _close_parts(self, finished: list[tuple[str, str]]) -> list[str]:
        """Ids of which no part is left running."""
        done = []
        for event_id, part in finished:
            left = self._open_parts.get(event_id, frozenset()) - {part}
            self._open_parts[event_id] = left
            if not left:
                del self._open_parts[event_id]
                done.append(event_id)
        return done
