"""What the benchmark asks for: one picture, one prompt, a camera script and a length.

A rollout has 9 pixel frames in its first chunk and 12 in every later one; a chunk is 3 latent
frames, and the camera script names the keys held in each of them.
"""

import io
import json
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from vllm_omni.client import address
from vllm_omni.client.camera import KEYS
from vllm_omni.diffusion.geometry import (
    LATENT_FRAMES_PER_CHUNK,
    PIXELS_PER_TOKEN,
    chunks_of,
    pixel_frames_of,
)
from vllm_omni.diffusion.utils.scenes import first_picture
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import Message, PositiveInt, validate

DEFAULT_WARMUP_CHUNKS = 6
DEFAULT_NUM_CHUNKS = 16
DEFAULT_TRANSITION_CHUNKS = 3
DEFAULT_SCENE = "day"
DEFAULT_PROMPT = "The camera moves slowly forward through a calm, detailed scene."
CAMERA_PATTERNS = ("forward", "hold", "orbit")

CameraScript = tuple[tuple[tuple[str, ...], ...], ...]
"""Keys held, by chunk and latent frame."""


class WorkloadError(ValueError):
    """A workload that no server could run; the text says what to change."""


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """A prompt sent right after a chunk has arrived."""

    after_chunk: int
    prompt: str
    transition_chunks: int = DEFAULT_TRANSITION_CHUNKS


@dataclass(frozen=True, slots=True)
class Workload:
    """One rollout, complete and checked.

    Attributes:
        camera_pattern: name of the movement that made the script, if one did.
        image: path, ``data:`` or http(s) URL; ``None`` paints a scene.
        fps: rate of the video that the server makes.
    """

    num_chunks: int
    camera_action_script: CameraScript
    prompt: str = DEFAULT_PROMPT
    camera_pattern: str | None = None
    image: str | None = None
    width: int = 832
    height: int = 480
    fps: float | int = 16
    seed: int = 42
    flow_shift: float | int = 5.0
    negative_prompt: str | None = None
    prompt_updates: tuple[PromptUpdate, ...] = ()
    extra_params: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, side in (("width", self.width), ("height", self.height)):
            if side < PIXELS_PER_TOKEN or side % PIXELS_PER_TOKEN:
                raise WorkloadError(f"{name} must be a multiple of {PIXELS_PER_TOKEN}, got {side}")
        if len(self.camera_action_script) != self.num_chunks:
            raise WorkloadError(
                f"camera_action_script has {len(self.camera_action_script)} chunks, the rollout "
                f"has {self.num_chunks}"
            )
        for update in self.prompt_updates:
            if not 0 <= update.after_chunk < self.num_chunks - 1:
                raise WorkloadError(
                    f"a prompt update after chunk {update.after_chunk} changes nothing in a "
                    f"rollout of chunks 0 to {self.num_chunks - 1}"
                )

    @property
    def num_frames(self) -> int:
        """Pixel frames of the rollout."""
        return frames_for_chunks(self.num_chunks)

    @property
    def video_seconds(self) -> float:
        """Playing time at the video's own rate."""
        return self.num_frames / self.fps


def frames_for_chunks(num_chunks: int) -> int:
    """Pixel frames of ``num_chunks`` chunks: 9, 21, 33, ..."""
    if num_chunks < 1:
        raise WorkloadError(f"a rollout has at least 1 chunk, got {num_chunks}")
    return pixel_frames_of(num_chunks)


def chunks_for_frames(num_frames: int) -> int:
    """Chunks of ``num_frames`` pixel frames.

    Raises:
        WorkloadError: the count is not 9 + 12k.
    """
    try:
        return chunks_of(num_frames)
    except InvalidRequestError:
        text = f"a rollout has 9 + 12k frames (9, 21, 33, ...), got {num_frames}"
        raise WorkloadError(text) from None


def build_camera_script(pattern: str, num_chunks: int) -> CameraScript:
    """Script of a named movement.

    Args:
        pattern: ``forward`` holds w, ``hold`` nothing, ``orbit`` one of w, a, s, d per chunk.

    Raises:
        WorkloadError: unknown pattern.
    """
    keys_by_pattern = {"forward": ("w",), "hold": ("",), "orbit": ("w", "a", "s", "d")}
    if pattern not in keys_by_pattern:
        raise WorkloadError(f"camera pattern must be one of {CAMERA_PATTERNS}, got {pattern!r}")
    cycle = keys_by_pattern[pattern]
    held = (tuple(cycle[index % len(cycle)]) for index in range(num_chunks))
    return tuple((keys,) * LATENT_FRAMES_PER_CHUNK for keys in held)


def load_workload(
    path: Path | None,
    overrides: Mapping[str, object],
    *,
    find_size: Callable[[], tuple[int, int] | None] | None = None,
) -> Workload:
    """Workload of a JSON file and of flags, which win; ``None`` among the flags is "not given".

    Without a file the length defaults to 16 chunks; a file must name its own length.

    Args:
        find_size: asked for width and height where neither side is given; ``None`` is 832x480.

    Raises:
        WorkloadError: unknown keys, wrong types, or a rollout that is not possible.
        OSError: the file cannot be read.
    """
    values: dict[str, object] = {} if path is None else _read_file(path)
    values |= {name: value for name, value in overrides.items() if value is not None}
    if path is None:
        values.setdefault("num_chunks", DEFAULT_NUM_CHUNKS)
    if find_size is not None and not values.keys() & {"width", "height"}:
        found = find_size()
        if found is not None:
            values["width"], values["height"] = found
    pattern = str(values.get("camera_pattern", "forward"))
    given = values.pop("camera_action_script", None)
    script = _script(given, values, pattern)
    values["camera_pattern"] = pattern if given is None else None
    values.pop("num_chunks", None)
    updates = tuple(_prompt_update(row) for row in _rows(values.pop("prompt_updates", [])))
    try:
        return Workload(len(script), script, prompt_updates=updates, **values)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise WorkloadError(f"workload: {error}") from error


def _read_file(path: Path) -> dict[str, object]:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise WorkloadError(f"{path}: a workload is a JSON object, got {type(values).__name__}")
    known = {"image_reference", *(one.name for one in fields(Workload))}
    if unknown := sorted(values.keys() - known):
        raise WorkloadError(f"{path}: unknown keys {unknown}; known: {sorted(known)}")
    reference = values.pop("image_reference", None)
    if isinstance(reference, dict):
        reference = reference.get("image_url")
    image = values.pop("image", None) or reference
    if image is not None:
        name = str(image)
        values["image"] = name if address.is_url(name) else str(path.parent / name)
    return values


class _Length(Message):
    num_chunks: PositiveInt | None = None


def _script(raw: object, values: Mapping[str, object], pattern: str) -> CameraScript:
    try:
        num_chunks = validate(_Length, values).num_chunks
    except InvalidRequestError as error:
        raise WorkloadError(str(error)) from None
    if raw is None:
        if num_chunks is None:
            raise WorkloadError("the workload has no length: give num_chunks or a script")
        return build_camera_script(pattern, num_chunks)
    script = tuple(_script_chunk(index, chunk) for index, chunk in enumerate(_rows(raw)))
    if not script:
        raise WorkloadError("camera_action_script is empty")
    if num_chunks not in {None, len(script)}:
        raise WorkloadError(
            f"camera_action_script fixes the length to {len(script)} chunks, but num_chunks is "
            f"{num_chunks}"
        )
    return script


def _script_chunk(index: int, raw: object) -> tuple[tuple[str, ...], ...]:
    frames = _rows(raw)
    if len(frames) != LATENT_FRAMES_PER_CHUNK:
        raise WorkloadError(
            f"camera_action_script[{index}] has {len(frames)} latent frames, needs "
            f"{LATENT_FRAMES_PER_CHUNK}"
        )
    held = tuple(tuple(str(key).lower() for key in _rows(keys)) for keys in frames)
    unknown = sorted({key for keys in held for key in keys} - KEYS)
    if unknown:
        raise WorkloadError(f"camera_action_script[{index}] has unknown keys {unknown}")
    return held


def _prompt_update(row: object) -> PromptUpdate:
    if not isinstance(row, Mapping) or not {"after_chunk", "prompt"} <= row.keys():
        raise WorkloadError(f"a prompt update needs after_chunk and prompt, got {row!r:.100}")
    return PromptUpdate(
        after_chunk=int(row["after_chunk"]),
        prompt=str(row["prompt"]),
        transition_chunks=int(row.get("transition_chunks", DEFAULT_TRANSITION_CHUNKS)),
    )


def _rows(raw: object) -> Sequence[object]:
    if not isinstance(raw, list | tuple):
        raise WorkloadError(f"must be a list, got {raw!r:.100}")
    return raw


def image_url(image: str | None, *, width: int, height: int) -> str:
    """A picture as the server takes it: URLs as they are, a file or a painted scene inlined.

    Raises:
        WorkloadError: the file is not a picture by its name.
        FileNotFoundError: there is no such file.
    """
    if image is None:
        buffer = io.BytesIO()
        first_picture(DEFAULT_SCENE, height=height, width=width).save(buffer, format="PNG")
        return address.image_url(buffer.getvalue())
    if address.is_url(image):
        return image
    path = Path(image).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"image not found: {path}")
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise WorkloadError(f"{path} is not a picture by its name; use .png, .jpg or .webp")
    return address.image_url(path)


def session_start(workload: Workload, *, model: str | None = None) -> dict[str, object]:
    """The first message of a session."""
    message: dict[str, object] = {
        "type": "session.start",
        "format": "m4s",
        "prompt": workload.prompt,
        "image_reference": {
            "image_url": image_url(workload.image, width=workload.width, height=workload.height)
        },
        "width": workload.width,
        "height": workload.height,
        "num_frames": workload.num_frames,
        "fps": workload.fps,
        "seed": workload.seed,
        "extra_params": {
            **workload.extra_params,
            "flow_shift": workload.flow_shift,
            "camera_action_script": workload.camera_action_script,
        },
    }
    optional = {"model": model, "negative_prompt": workload.negative_prompt}
    return message | {name: value for name, value in optional.items() if value is not None}
