"""The camera of a request: a recorded path, scripted keys, or live."""

from collections.abc import Mapping

from vllm_omni.diffusion.camera_motion import normalise_keys
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, pixel_frames_of
from vllm_omni.diffusion.messages import CameraSource, LiveCamera, ScriptedKeys
from vllm_omni.diffusion.models.lingbot_world.fields import shown
from vllm_omni.diffusion.models.lingbot_world.trajectory import load_recorded_camera
from vllm_omni.errors import InvalidRequestError

_SCRIPT = "extra_args.camera_action_script"


def parse_camera(
    extra_args: Mapping[str, object],
    num_chunks: int | None,
    *,
    action_root: str | None,
    allow_live_camera: bool,
) -> CameraSource:
    """Read ``action_path`` or ``camera_action_script``; with neither the camera is live.

    Args:
        num_chunks: length of the rollout, ``None`` for an unbounded one, which only a live
            camera can follow.
        action_root: trusted root of recorded paths.

    Raises:
        InvalidRequestError: naming the field, the chunk or the frame at fault.
    """
    path, script = extra_args.get("action_path"), extra_args.get("camera_action_script")
    if path is not None and script is not None:
        raise InvalidRequestError(
            "excludes extra_args.action_path; give one of both", field=_SCRIPT
        )
    if path is None and script is None:
        if not allow_live_camera:
            raise InvalidRequestError(
                "needs action_path or camera_action_script; a live camera needs a stream",
                field="extra_args",
            )
        return LiveCamera()
    name = "action_path" if script is None else "camera_action_script"
    if num_chunks is None:
        raise InvalidRequestError(
            "has a fixed length and excludes an unbounded session", field=f"extra_args.{name}"
        )
    if script is not None:
        return _parse_script(script, num_chunks)
    if not isinstance(path, str):
        raise InvalidRequestError(
            f"must be text, got {type(path).__name__}", field="extra_args.action_path"
        )
    return load_recorded_camera(action_root, path, pixel_frames_of(num_chunks))


def _parse_script(script: object, num_chunks: int) -> ScriptedKeys:
    if not isinstance(script, list | tuple):
        raise InvalidRequestError(
            f"must be a list of chunks, got {type(script).__name__}", field=_SCRIPT
        )
    if len(script) != num_chunks:
        raise InvalidRequestError(
            f"needs {num_chunks} chunks for num_frames {pixel_frames_of(num_chunks)}, got "
            f"{len(script)}",
            field=_SCRIPT,
        )
    return ScriptedKeys(tuple(_parse_script_chunk(chunk, i) for i, chunk in enumerate(script)))


def _parse_script_chunk(
    chunk: object, index: int
) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    if not isinstance(chunk, list | tuple) or len(chunk) != LATENT_FRAMES_PER_CHUNK:
        got = len(chunk) if isinstance(chunk, list | tuple) else type(chunk).__name__
        raise InvalidRequestError(
            f"chunk {index} needs {LATENT_FRAMES_PER_CHUNK} lists of keys, got {got}",
            field=_SCRIPT,
        )
    first, second, third = (_parse_keys(keys, index) for keys in chunk)
    return first, second, third


def _parse_keys(keys: object, index: int) -> frozenset[str]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise InvalidRequestError(
            f"chunk {index} needs lists of keys, got {shown(keys)}", field=_SCRIPT
        )
    try:
        return normalise_keys(keys)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"chunk {index}: {error}", field=_SCRIPT) from None
