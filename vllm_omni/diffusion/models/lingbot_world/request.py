"""The only validator: whatever a client gives becomes a :class:`SessionRequest` or an error.

Cheap checks come first; the picture is decoded and a recorded path read only once everything
else is known to be right. Nothing here loads torch.
"""

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni import envs
from vllm_omni.config.deploy import INFERENCE_STEPS, MAX_SEQUENCE_LENGTH
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.geometry import (
    PIXELS_PER_TOKEN,
    VideoGeometry,
    chunks_of,
    pixel_frames_of,
)
from vllm_omni.diffusion.messages import OutputKind, SessionRequest, SourceImage
from vllm_omni.diffusion.models.lingbot_world.camera_request import parse_camera
from vllm_omni.diffusion.models.lingbot_world.fields import (
    integer,
    mapping,
    positive_number,
    shown,
)
from vllm_omni.diffusion.models.lingbot_world.image import load_image
from vllm_omni.errors import InvalidRequestError, UnsupportedParallelismError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

NATIVE_FPS = 16.0
"""Playback rate of requests that name none."""
DEFAULT_AREA = 480 * 832
"""Pixels of a rollout whose size follows from the picture."""
MAX_SIDE = 4096
MAX_CHUNKS = 1_000_000
"""Nine days at 16 frames per second; for longer there are unbounded sessions."""

_PROMPT_KEYS = ("prompt", "multi_modal_data", "negative_prompt", "additional_information")
_EXTRA_ARGS = ("flow_shift", "action_path", "camera_action_script")
_TICK_KEYS = ("ar_diffusion_tick", "session_id", "reset", "close_session")
_DEVICE = re.compile(r"(cpu|cuda|npu)(:\d{1,3})?")
_MAX_FPS = 1000.0
_MAX_FLOW_SHIFT = 1000.0
_LENGTHS = "a rollout has 9 + 12k pixel frames (9, 21, 33, 45, ...)"


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What an engine allows, beside the rules of the model.

    Attributes:
        action_root: trusted root of recorded paths.
        geometry: size of requests that name none; ``None`` derives it from the picture.
        parallel: degrees that a size must fit.
        allow_live_camera: whether a request may leave the camera to interactions.
        max_chunks: longest rollout, ``None`` for no limit but the validator's own.
        array_output: what ``output_type`` "np", the default, stands for: clips that are
            collected are float, streams are uint8.
    """

    action_root: str | None = None
    geometry: VideoGeometry | None = None
    parallel: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    allow_live_camera: bool = True
    max_chunks: int | None = None
    array_output: OutputKind = OutputKind.UINT8

    @classmethod
    def of(
        cls,
        config: OmniDiffusionConfig,
        *,
        allow_live_camera: bool = True,
        array_output: OutputKind = OutputKind.UINT8,
    ) -> "RequestPolicy":
        """Policy of an engine; the action root falls back to the environment's."""
        return cls(
            action_root=config.action_root or envs.action_root(),
            geometry=config.geometry,
            parallel=config.parallel,
            allow_live_camera=allow_live_camera,
            array_output=array_output,
        )


def parse_request(
    prompt: object,
    params: OmniDiffusionSamplingParams,
    policy: RequestPolicy,
    *,
    unbounded: bool | None = None,
) -> SessionRequest:
    """Validate a prompt and its sampling parameters.

    Args:
        prompt: ``{"prompt": str, "multi_modal_data": {"image": ...}}``.
        unbounded: run until stopped; then ``num_frames`` must not be given. ``None`` where that
            is not on offer.

    Raises:
        InvalidRequestError: naming the field, what was got and what is needed.
    """
    text, image_source = _parse_prompt(prompt)
    _check_fixed(params)
    extra_args = _parse_extra_args(params.extra_args)
    num_chunks = _parse_length(params.num_frames, policy, unbounded=unbounded)
    geometry = _parse_size(params.height, params.width)
    if geometry is not None:
        _check_geometry(geometry, policy)
    flow_shift = _optional_number(
        extra_args.get("flow_shift"), "extra_args.flow_shift", limit=_MAX_FLOW_SHIFT
    )
    fps = _optional_number(params.fps, "fps", limit=_MAX_FPS)
    seed = _parse_seed(params.seed)
    output = _parse_output(params.output_type, policy)
    generator_device = _parse_device(params.generator_device)
    camera = parse_camera(
        extra_args,
        num_chunks,
        action_root=policy.action_root,
        allow_live_camera=policy.allow_live_camera,
    )
    image = load_image(image_source)
    if geometry is None:
        geometry = policy.geometry or _size_of_picture(image)
        _check_geometry(geometry, policy)
    return SessionRequest(
        prompt=text,
        image=image,
        height=geometry.height,
        width=geometry.width,
        num_chunks=num_chunks,
        seed=seed,
        camera=camera,
        output=output,
        flow_shift=flow_shift,
        fps=NATIVE_FPS if fps is None else fps,
        generator_device=generator_device,
    )


def normalise_prompt(prompt: str, *, field: str = "prompt") -> str:
    """Make every run of whitespace one space.

    Raises:
        InvalidRequestError: if nothing is left, or it is not valid Unicode.
    """
    text = " ".join(prompt.split())
    if not text:
        raise InvalidRequestError("must not be blank", field=field)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError("holds half of a surrogate pair", field=field) from None
    return text


def _parse_prompt(prompt: object) -> tuple[str, object]:
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            'must be {"prompt": text, "multi_modal_data": {"image": picture}}, got '
            f"{type(prompt).__name__}",
            field="prompt",
        )
    additional = prompt.get("additional_information")
    if isinstance(additional, Mapping) and "action_path" in additional:
        raise InvalidRequestError(
            "give the path as sampling parameter extra_args.action_path",
            field="additional_information.action_path",
        )
    given = mapping(prompt, "prompt", _PROMPT_KEYS)
    if additional is not None:
        mapping(additional, "additional_information", ())
    text = given.get("prompt")
    if not isinstance(text, str):
        got = "nothing" if text is None else type(text).__name__
        raise InvalidRequestError(f"must be text, got {got}", field="prompt")
    media = given.get("multi_modal_data")
    if media is None:
        raise InvalidRequestError("needs an image, got nothing", field="multi_modal_data")
    image = mapping(media, "multi_modal_data", ("image",)).get("image")
    if image is None:
        raise InvalidRequestError("is required, got nothing", field="multi_modal_data.image")
    return normalise_prompt(text), image


def _check_fixed(params: OmniDiffusionSamplingParams) -> None:
    """Parameters that exist for other models and must have the one value that fits this one."""
    fixed = {
        "num_inference_steps": (params.num_inference_steps, INFERENCE_STEPS),
        "max_sequence_length": (params.max_sequence_length, MAX_SEQUENCE_LENGTH),
        "num_outputs_per_prompt": (params.num_outputs_per_prompt, 1),
    }
    for name, (value, needed) in fixed.items():
        if value is not None and integer(value, name) != needed:
            raise InvalidRequestError(f"must be {needed}, got {shown(value)}", field=name)
    if params.latents is not None:
        raise InvalidRequestError("must not be given; noise is drawn from seed", field="latents")
    if params.generator is not None:
        raise InvalidRequestError("must not be given; give seed", field="generator")


def _parse_extra_args(extra_args: object) -> Mapping[str, object]:
    if extra_args is None:
        return {}
    if isinstance(extra_args, Mapping):
        for name in _TICK_KEYS:
            if name in extra_args:
                raise InvalidRequestError(
                    "the tick protocol is not served; open a streaming session",
                    field=f"extra_args.{name}",
                )
    return mapping(extra_args, "extra_args", _EXTRA_ARGS)


def _parse_length(
    num_frames: object, policy: RequestPolicy, *, unbounded: bool | None
) -> int | None:
    if unbounded:
        if num_frames not in (None, 1):  # 1 is the default of the parameters
            raise InvalidRequestError(
                f"must not be given for an unbounded session, got {shown(num_frames)}",
                field="num_frames",
            )
        return None
    pixel_frames = 1 if num_frames is None else integer(num_frames, "num_frames")
    if pixel_frames == 1:
        endless = "" if unbounded is None else "; or give unbounded: true for an endless world"
        raise InvalidRequestError(
            f"is required: {_LENGTHS}; none was given, and 1 counts as none{endless}",
            field="num_frames",
        )
    limit = min(MAX_CHUNKS, policy.max_chunks or MAX_CHUNKS)
    if pixel_frames > pixel_frames_of(limit):
        raise InvalidRequestError(
            f"must be at most {pixel_frames_of(limit)} (9 + 12k), got {shown(pixel_frames)}",
            field="num_frames",
        )
    return chunks_of(pixel_frames)


def _parse_size(height: object, width: object) -> VideoGeometry | None:
    if height is None and width is None:
        return None
    if height is None or width is None:
        missing = "height" if height is None else "width"
        raise InvalidRequestError(
            f"give both height and width or neither, got height {shown(height)} and width "
            f"{shown(width)}",
            field=missing,
        )
    rows, columns = integer(height, "height"), integer(width, "width")
    for name, side in (("height", rows), ("width", columns)):
        if side > MAX_SIDE:
            raise InvalidRequestError(
                f"must be at most {MAX_SIDE} pixels, got {shown(side)}", field=name
            )
    return VideoGeometry(rows, columns)


def _size_of_picture(image: SourceImage) -> VideoGeometry:
    """The picture's shape at about ``DEFAULT_AREA`` pixels, in steps of 16."""
    pixels = image.signed if image.rgb is None else image.rgb
    assert pixels is not None, "a SourceImage holds one of two arrays"
    rows, columns = pixels.shape[:2]
    aspect = rows / columns
    height = round(math.sqrt(DEFAULT_AREA * aspect) // 8 // 2 * 2) * 8
    width = round(math.sqrt(DEFAULT_AREA / aspect) // 8 // 2 * 2) * 8
    if min(height, width) < PIXELS_PER_TOKEN or max(height, width) > MAX_SIDE:
        raise InvalidRequestError(
            f"a picture of {columns}x{rows} would make a video of {width}x{height}; give height "
            f"and width between {PIXELS_PER_TOKEN} and {MAX_SIDE}",
            field="height",
        )
    return VideoGeometry(height, width)


def _check_geometry(geometry: VideoGeometry, policy: RequestPolicy) -> None:
    try:
        policy.parallel.check_geometry(geometry)
    except UnsupportedParallelismError as error:
        raise InvalidRequestError(str(error), field="height") from error


def _parse_seed(seed: object) -> int:
    """The seed; one is drawn, and recorded in the request, where none was given."""
    if seed is None:
        return secrets.randbits(63)
    value = integer(seed, "seed")
    if not -(2**63) <= value < 2**63:
        raise InvalidRequestError(f"must fit into 64 bits, got {shown(value)}", field="seed")
    return value


def _optional_number(value: object, field: str, *, limit: float) -> float | None:
    return None if value is None else positive_number(value, field, limit=limit)


def _parse_output(output_type: object, policy: RequestPolicy) -> OutputKind:
    kinds = {
        None: policy.array_output,
        "np": policy.array_output,
        "pil": OutputKind.UINT8,
        "latent": OutputKind.LATENT,
    }
    if not isinstance(output_type, str | None) or output_type not in kinds:
        raise InvalidRequestError(
            f'must be "np", "pil" or "latent", got {shown(output_type)}', field="output_type"
        )
    return kinds[output_type]


def _parse_device(device: object) -> str | None:
    if device is None:
        return None
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise InvalidRequestError(
            f'must be "cpu", "cuda" or "npu", got {shown(device)}', field="generator_device"
        )
    return device
