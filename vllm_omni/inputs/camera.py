"""The camera of a request: a recorded path, scripted keys, or live. No torch.

A recorded path is a directory below a trusted root: ``poses.npy`` [F, 4, 4] holds camera-to-world
poses and ``intrinsics.npy`` [F, 4] holds fx, fy, cx, cy at 832x480 reference pixels, one row per
pixel frame. Other files are ignored.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from vllm_omni.diffusion.camera_motion import float32_keeps_motion, moved_to_first, normalise_keys
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.messages import CameraSource, LiveCamera, RecordedCamera, ScriptedKeys
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.safe_files import open_directory_below, open_file_in, read_npy
from vllm_omni.wording import shown

MAX_RECORDED_FRAMES = 4096
ROTATION_TOLERANCE = 1e-2
"""Largest element of ``|RᵀR - 1|`` that counts as a rotation. Recorded paths are never perfect:
float32 trackers give 1e-6, files written with three decimals 2e-3; a scale of 1 % gives 2e-2."""
COMPONENT_LIMIT = 1e12
"""Largest pose or intrinsics component; squares of larger ones leave float32."""

_FIELD = "extra_args.action_path"
_LAST_ROW = (0.0, 0.0, 0.0, 1.0)
_LAST_ROW_TOLERANCE = 1e-6

ScriptedChunk = tuple[frozenset[str], frozenset[str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class RecordedPath:
    """A recorded camera that is still in its files.

    Attributes:
        root: trusted directory of the operator.
        path: directory below the root.
        pixel_frames: frames that the rollout needs.
    """

    root: str
    path: str
    pixel_frames: int


CameraChoice = RecordedPath | ScriptedKeys | LiveCamera


def read_script(script: object) -> ScriptedKeys:
    """Read a list with three lists of keys for each chunk, one list for each latent frame.

    Raises:
        ValueError: naming the chunk that has another form.
    """
    if not isinstance(script, list | tuple):
        raise ValueError(f"must be a list of chunks, got {shown(script)}")  # noqa: TRY004
    return ScriptedKeys(tuple(_chunk(chunk, index) for index, chunk in enumerate(script)))


def _chunk(chunk: object, index: int) -> ScriptedChunk:
    if not isinstance(chunk, list | tuple) or len(chunk) != LATENT_FRAMES_PER_CHUNK:
        got = len(chunk) if isinstance(chunk, list | tuple) else type(chunk).__name__
        raise ValueError(f"chunk {index} needs {LATENT_FRAMES_PER_CHUNK} lists of keys, got {got}")
    first, second, third = (_keys(keys, index) for keys in chunk)
    return first, second, third


def _keys(keys: object, index: int) -> frozenset[str]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"chunk {index} needs lists of keys, got {shown(keys)}")
    try:
        return normalise_keys(keys)
    except InvalidRequestError as error:
        raise ValueError(f"chunk {index}: {error}") from None


def read_camera(choice: CameraChoice) -> CameraSource:
    """Read the files of a recorded path; other cameras are complete.

    Raises:
        InvalidRequestError: naming the file and, where one is to blame, the frame index; never a
            path of this machine.
    """
    if not isinstance(choice, RecordedPath):
        return choice
    with open_directory_below(choice.root, choice.path, field=_FIELD) as directory:
        poses = _read(directory, "poses.npy", (4, 4))
        intrinsics = _read(directory, "intrinsics.npy", (4,)).astype(np.float32)
    if len(poses) != len(intrinsics):
        raise InvalidRequestError(
            f"poses.npy has {len(poses)} frames, intrinsics.npy {len(intrinsics)}; "
            "both need the same number",
            field=_FIELD,
        )
    if len(poses) < choice.pixel_frames:
        raise InvalidRequestError(
            f"the path has {len(poses)} frames, num_frames {choice.pixel_frames} needs at least as "
            "many",
            field=_FIELD,
        )
    _check_poses(poses)
    _refuse_first(intrinsics[:, :2] <= 0.0, "intrinsics.npy", "needs positive fx and fy")
    path = poses[: choice.pixel_frames]
    keeps = float32_keeps_motion(path)
    path = path.astype(np.float32) if keeps else moved_to_first(path)
    return RecordedCamera(path, intrinsics[: choice.pixel_frames].copy())


def _read(directory: int, name: str, row_shape: tuple[int, ...]) -> Float[np.ndarray, "frames ..."]:
    """Read the rows of one file, as float32 if they are stored so, else as float64."""
    with open_file_in(directory, name, field=_FIELD) as file:
        raw = read_npy(
            file, row_shape=row_shape, max_rows=MAX_RECORDED_FRAMES, field=f"{_FIELD}: {name}"
        )
    kept = np.float32 if raw.dtype.kind == "f" and raw.itemsize <= 4 else np.float64
    with np.errstate(invalid="ignore"):  # Of a signalling NaN, which is refused by name.
        rows = raw.astype(kept)
    _check_range(rows, name)
    return rows


def _check_range(rows: Float[np.ndarray, "frames ..."], name: str) -> None:
    _refuse_first(~np.isfinite(rows), name, "holds NaN or infinity")
    too_large = np.abs(rows.astype(np.float64)) > COMPONENT_LIMIT
    _refuse_first(too_large, name, f"needs numbers within +-{COMPONENT_LIMIT:g}")


def _check_poses(poses: Float[np.ndarray, "frames 4 4"]) -> None:
    wide = poses.astype(np.float64)
    wrong = np.abs(wide[:, 3] - _LAST_ROW) > _LAST_ROW_TOLERANCE
    _refuse_first(wrong, "poses.npy", "needs 0 0 0 1 as its last row")
    rotation = wide[:, :3, :3]
    error = np.abs(rotation.transpose(0, 2, 1) @ rotation - np.eye(3)).max(axis=(1, 2))
    bad = error > ROTATION_TOLERANCE
    got = error[int(np.argmax(bad))]
    needed = f"needs a rotation orthonormal within {ROTATION_TOLERANCE:g}"
    _refuse_first(bad, "poses.npy", f"{needed}, got {got:.3g}")
    handedness = np.asarray(np.linalg.det(rotation))
    _refuse_first(handedness < 0.0, "poses.npy", f"{needed}, got a reflection")


def _refuse_first(bad: Bool[np.ndarray, "frames ..."], name: str, problem: str) -> None:
    """Refuse the file for the first frame in which anything is bad."""
    frames = np.nonzero(bad)[0]
    if len(frames):
        raise InvalidRequestError(f"{name}: frame {frames[0]} {problem}", field=_FIELD)
