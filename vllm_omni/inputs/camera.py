"""The camera of a request: a recorded path, scripted keys, or live; without reading a file."""

from dataclasses import dataclass

from vllm_omni.diffusion.camera_motion import normalise_keys
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.diffusion.messages import CameraSource, LiveCamera, ScriptedKeys
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.recorded_camera import load_recorded_camera
from vllm_omni.wording import shown

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


def read_camera(choice: CameraChoice) -> CameraSource:
    """Read the files of a recorded path; other cameras are complete.

    Raises:
        InvalidRequestError: naming the file and frame at fault, never a path of this machine.
    """
    if not isinstance(choice, RecordedPath):
        return choice
    return load_recorded_camera(choice.root, choice.path, choice.pixel_frames)


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
