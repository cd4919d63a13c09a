"""The camera that interactions steer: target and velocity motions, one step per latent frame.

A pose is camera-to-world in the session's own frame, which is the first camera's: +X right,
+Y down, +Z forward, the identity at the start. Everything is float64 and without torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.rotation import matrix_of, nlerp, quaternion_of
from vllm_omni.errors import InteractionError

DEFAULT_TRANSITION_CHUNKS = 1
COMPONENT_LIMIT = 1e6
"""Largest translation or quaternion component; beyond it float32 rays lose every digit."""
CAMERA_FIELD = "multi_modal_data.camera"

_TARGET_MODES = ("target", "absolute")
_IDENTITY_XYZW = (0.0, 0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class CameraTarget:
    """Go to a pose relative to the session's origin.

    Attributes:
        rotation: quaternion x, y, z, w; normalised.
    """

    translation: tuple[float, float, float]
    rotation: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class CameraVelocity:
    """Multiply the pose by a delta at every latent frame, until replaced.

    Attributes:
        rotation: quaternion x, y, z, w; normalised.
    """

    translation: tuple[float, float, float]
    rotation: tuple[float, float, float, float]


CameraMotion = CameraTarget | CameraVelocity


@dataclass(frozen=True, slots=True)
class CameraEvent:
    """A motion and how long a target takes; a velocity ignores ``transition_chunks``."""

    event_id: str
    motion: CameraMotion
    transition_chunks: int = DEFAULT_TRANSITION_CHUNKS


@dataclass(frozen=True, slots=True, eq=False)
class ActiveMotion:
    """The event that moves the camera now.

    Attributes:
        start: pose when the event took effect.
        done_latent_frames: steps taken towards a target.
        total_latent_frames: steps that a target takes; 0 for a velocity.
    """

    event: CameraEvent
    start: Float64[np.ndarray, "4 4"]
    done_latent_frames: int
    total_latent_frames: int


@dataclass(frozen=True, slots=True, eq=False)
class CameraPoseState:
    """Pose after the last latent frame and what still moves it. Never changed in place."""

    pose: Float64[np.ndarray, "4 4"]
    active: ActiveMotion | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CameraAdvance:
    """What one chunk did to the camera.

    Attributes:
        poses: of the chunk's three latent frames.
        started: ids of events that took effect in this chunk, in order.
        active: ids still moving the camera at its end.
        completed: ids that reached their target or were replaced.
    """

    poses: Float64[np.ndarray, "3 4 4"]
    state: CameraPoseState
    started: tuple[str, ...]
    active: tuple[str, ...]
    completed: tuple[str, ...]


class CameraPoseSession:
    """Walks a camera through events. Holds no state of its own."""

    @staticmethod
    def fresh() -> CameraPoseState:
        """State before chunk 0: identity pose, nothing moving."""
        return CameraPoseState(np.eye(4))

    @staticmethod
    def advance(
        state: CameraPoseState, events_at_latent_frame: Mapping[int, Sequence[CameraEvent]]
    ) -> CameraAdvance:
        """Poses of the next chunk.

        Args:
            state: after the chunk before.
            events_at_latent_frame: events by latent frame of the chunk (0 to 2), each list in
                order of arrival. An event moves the frame it is placed at already.

        Raises:
            InteractionError: if an event is placed outside the chunk.
        """
        for index in events_at_latent_frame:
            if not 0 <= index < LATENT_FRAMES_PER_CHUNK:
                raise InteractionError(
                    f"a chunk has latent frames 0 to {LATENT_FRAMES_PER_CHUNK - 1}, got {index}"
                )
        poses, started, completed = [], [], []
        for index in range(LATENT_FRAMES_PER_CHUNK):
            for event in events_at_latent_frame.get(index, ()):
                if state.active is not None:
                    completed.append(state.active.event.event_id)
                started.append(event.event_id)
                state, done = _activate(state, event)
                completed.extend(done)
            state, done = _step(state)
            completed.extend(done)
            poses.append(state.pose)
        active = () if state.active is None else (state.active.event.event_id,)
        return CameraAdvance(np.stack(poses), state, tuple(started), active, tuple(completed))


def _activate(state: CameraPoseState, event: CameraEvent) -> tuple[CameraPoseState, list[str]]:
    if isinstance(event.motion, CameraVelocity):
        return CameraPoseState(state.pose, ActiveMotion(event, state.pose, 0, 0)), []
    if event.transition_chunks <= 0:
        return CameraPoseState(_matrix(event.motion)), [event.event_id]
    total = max(1, round(event.transition_chunks * LATENT_FRAMES_PER_CHUNK))
    return CameraPoseState(state.pose, ActiveMotion(event, state.pose, 0, total)), []


def _step(state: CameraPoseState) -> tuple[CameraPoseState, list[str]]:
    active = state.active
    if active is None:
        return state, []
    motion = active.event.motion
    if isinstance(motion, CameraVelocity):
        return CameraPoseState(state.pose @ _matrix(motion), active), []
    done = active.done_latent_frames + 1
    if done == active.total_latent_frames:
        return CameraPoseState(_matrix(motion)), [active.event.event_id]
    pose = _between(active.start, motion, done / active.total_latent_frames)
    return CameraPoseState(pose, replace(active, done_latent_frames=done)), []


def _matrix(motion: CameraMotion) -> Float64[np.ndarray, "4 4"]:
    x, y, z, w = motion.rotation
    pose = np.eye(4)
    pose[:3, :3] = matrix_of(np.array([w, x, y, z]))
    pose[:3, 3] = motion.translation
    return pose


def _between(
    start: Float64[np.ndarray, "4 4"], target: CameraTarget, fraction: float
) -> Float64[np.ndarray, "4 4"]:
    x, y, z, w = target.rotation
    pose = np.eye(4)
    blend = nlerp(quaternion_of(start[:3, :3]), np.array([w, x, y, z]), fraction)
    pose[:3, :3] = matrix_of(blend)
    pose[:3, 3] = (1.0 - fraction) * start[:3, 3] + fraction * np.array(target.translation)
    return pose


def parse_camera_payload(payload: object) -> CameraMotion:
    """Read ``multi_modal_data.camera`` of an interaction.

    ``{mode?: "target" | "velocity", data: {translation?: [x, y, z], rotation?: [x, y, z, w]}}``;
    the mode is "target" and the motion zero where not given.

    Raises:
        InteractionError: naming the field that cannot be used.
    """
    camera = _mapping(payload, CAMERA_FIELD, ("mode", "data"))
    mode = camera.get("mode")
    if mode is not None and mode not in (*_TARGET_MODES, "velocity"):
        raise InteractionError(
            f'must be "target" or "velocity", got {mode!r:.100}', field=f"{CAMERA_FIELD}.mode"
        )
    if camera.get("data") is None:
        raise InteractionError(
            "must hold translation and rotation, got nothing", field=f"{CAMERA_FIELD}.data"
        )
    field = f"{CAMERA_FIELD}.data"
    if isinstance(camera["data"], Mapping) and "actions" in camera["data"]:
        raise InteractionError(
            "keys are not camera data; send the velocity or target they stand for",
            field=f"{field}.actions",
        )
    data = _mapping(camera["data"], field, ("translation", "rotation"))
    x, y, z = _numbers(data.get("translation"), (0.0, 0.0, 0.0), f"{field}.translation")
    rotation = _unit_quaternion(data.get("rotation"), f"{field}.rotation")
    kind = CameraVelocity if mode == "velocity" else CameraTarget
    return kind((x, y, z), rotation)


def _mapping(value: object, field: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InteractionError(f"must be an object, got {type(value).__name__}", field=field)
    for name in value:
        if name not in known:
            raise InteractionError(
                f"unknown key {name!r:.100}; known are {', '.join(known)}", field=field
            )
    return value


def _numbers(value: object, default: tuple[float, ...], field: str) -> tuple[float, ...]:
    if value is None:
        return default
    if not isinstance(value, list | tuple) or len(value) != len(default):
        got = len(value) if isinstance(value, list | tuple) else type(value).__name__
        raise InteractionError(f"must be {len(default)} numbers, got {got}", field=field)
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InteractionError(f"must hold numbers, got {number!r:.100}", field=field)
        # Compared, not converted: an integer may be too large for a float.
        if not -COMPONENT_LIMIT <= number <= COMPONENT_LIMIT:
            got = f"{number}" if isinstance(number, float) else "a larger integer"
            raise InteractionError(
                f"must hold finite numbers within +-{COMPONENT_LIMIT:g}, got {got}", field=field
            )
    return tuple(float(number) for number in value)


def _unit_quaternion(value: object, field: str) -> tuple[float, float, float, float]:
    components = _numbers(value, _IDENTITY_XYZW, field)
    largest = max(abs(component) for component in components)
    if largest < 1e-12:
        raise InteractionError("must not be the zero quaternion", field=field)
    # Scaled first, so that squares of small components do not vanish.
    scaled = [component / largest for component in components]
    norm = math.sqrt(math.fsum(component * component for component in scaled))
    x, y, z, w = (component / norm for component in scaled)
    return x, y, z, w
