"""What a client may ask for: any request becomes a :class:`RolloutRequest`, or an error.

:class:`Door` is the one way in. It checks what needs no picture and no file, against the bounds of
the product, the limits of the model and what the deployment can do; then it reads files and takes
the picture. Nothing here loads torch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.geometry import PIXELS_PER_TOKEN, VideoGeometry, chunks_of, pixel_frames_of
from vllm_omni.diffusion.messages import (
    LiveCamera,
    OutputKind,
    ScriptedKeys,
    SessionRequest,
    SourceImage,
    TokenizedPrompt,
)
from vllm_omni.errors import InvalidRequestError, UnsupportedParallelismError
from vllm_omni.inputs.camera import CameraChoice, RecordedPath, read_camera, read_script
from vllm_omni.inputs.checking import (
    MAX_SIDE,
    Checked,
    FlowShift,
    Fps,
    Frames,
    Guidance,
    Outputs,
    OutputType,
    PositiveInt,
    Prompt,
    Quality,
    Seed,
    Share,
    ShortText,
    Side,
    Steps,
    draw_seed,
    renamed,
    validate,
)

_DEVICE = re.compile(r"(cpu|cuda|npu)(:\d{1,3})?")
_TICK_KEYS = ("ar_diffusion_tick", "session_id", "reset", "close_session")
_OUTPUT_KINDS: Mapping[str | None, OutputKind] = {
    "pil": OutputKind.UINT8,
    "latent": OutputKind.LATENT,
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model makes of a request.

    Attributes:
        inference_steps: the only number of denoising steps that it runs.
        max_sequence_length: tokens of a prompt that it reads.
        native_fps: playback rate of requests that name none.
        area: pixels of a rollout whose size follows from the picture.
    """

    inference_steps: int
    max_sequence_length: int
    native_fps: float
    area: int


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What a deployment allows a request, and what it adds to one.

    Attributes:
        limits: of its model.
        defaults: values by field for requests that leave a field out, ``extra_args`` key by key.
        geometry: size of requests that name none; ``None`` derives it from the picture.
        parallel: degrees that a size must fit.
        action_root: trusted root of recorded camera paths, ``None`` where the operator named none.
        allow_live_camera: whether a request may leave the camera to interactions.
        array_output: what ``output_type`` "np", the default, stands for: clips that are collected
            are float, streams are uint8.
        max_pixels: largest ``height * width``, ``None`` for no limit but the sides' own.
    """

    limits: RequestLimits
    defaults: Mapping[str, object] = field(default_factory=dict)
    geometry: VideoGeometry | None = None
    parallel: DiffusionParallelConfig = field(default_factory=DiffusionParallelConfig)
    action_root: str | None = None
    allow_live_camera: bool = True
    array_output: OutputKind = OutputKind.UINT8
    max_pixels: int | None = None


def _device(name: str) -> str:
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"must be cpu, cuda or npu, got {name!r:.60}")
    return name


def _given(picture: object) -> object:
    if picture is None:
        raise ValueError("is required: the first picture of the world")
    return picture


class ModelOptions(Checked):
    """``extra_args`` of a request: the camera, and the sharpness of the schedule."""

    flow_shift: FlowShift | None = None
    action_path: Annotated[ShortText, Field(min_length=1)] | None = None
    camera_action_script: Annotated[ScriptedKeys, PlainValidator(read_script)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_ticks(cls, raw: object) -> object:
        for name in _TICK_KEYS:
            if isinstance(raw, Mapping) and name in raw:
                raise ValueError(
                    f"{name} is of the tick protocol, which is not served; open a streaming session"
                )
        return raw


class RolloutRequest(Checked):
    """A rollout as a client asks for it, whatever way it came.

    Attributes:
        prompt: with single spaces.
        image: the first picture, not decoded: whatever the way in takes as one.
        unbounded: run until stopped; ``None`` where that is not on offer.
        seed: drawn where none was given.
        num_inference_steps: no effect, as are all settings down to ``quality``: either the model
            has one value for them, or it was distilled without them.
    """

    prompt: Prompt
    image: Annotated[object, AfterValidator(_given)] = Field(None, validate_default=True)
    height: Side | None = None
    width: Side | None = None
    num_frames: Frames | None = None
    unbounded: bool | None = None
    seed: Seed = Field(default_factory=draw_seed)
    fps: Fps | None = None
    output_type: OutputType | None = None
    generator_device: Annotated[str, AfterValidator(_device)] | None = None
    num_inference_steps: Steps | None = None
    max_sequence_length: PositiveInt | None = None
    num_outputs_per_prompt: Outputs = 1
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    boundary_ratio: Share | None = None
    negative_prompt: str | None = None
    quality: Quality | None = None
    extra_args: ModelOptions = Field(default_factory=ModelOptions)

    @property
    def num_chunks(self) -> int | None:
        """Length of the rollout; ``None`` until stopped."""
        return None if self.num_frames is None else chunks_of(self.num_frames)

    @property
    def geometry(self) -> VideoGeometry | None:
        """The size that the request names, if it names one."""
        if self.height is None or self.width is None:
            return None
        return VideoGeometry(self.height, self.width)


@dataclass(frozen=True, slots=True)
class Door:
    """Turns what a client asks for into a request of the engine, in the client's own words.

    Attributes:
        policy: what the deployment allows.
        check_fits: raises for a size that the workers, where they are known, can never hold.
        prepare_picture: decodes a first picture, as the model wants it.
        tokenize: reads a prompt, as the model wants it.
        names: fields of a request that these clients know by another name.
    """

    policy: RequestPolicy
    check_fits: Callable[[VideoGeometry], None]
    prepare_picture: Callable[[object], SourceImage]
    tokenize: Callable[[str], TokenizedPrompt]
    names: Mapping[str, str]

    def check(self, given: Mapping[str, object]) -> RolloutRequest:
        """Check a request as far as that needs no picture and no file.

        Args:
            given: values by field of :class:`RolloutRequest`; ``None`` is a value that was not
                given.

        Raises:
            InvalidRequestError: naming the field, what was got and what is needed.
            OutOfKVMemoryError: if its window can never fit.
        """
        with self._in_their_words():
            request = validate(RolloutRequest, _with_defaults(given, self.policy.defaults))
            _check_fixed(request, self.policy.limits)
            _check_length(request)
            _check_size(request, self.policy)
            _camera_of(request, self.policy)
        size = request.geometry or self.policy.geometry
        if size is not None:
            self.check_fits(size)
        return request

    def picture(self, source: object) -> SourceImage:
        """Decode a picture; not for an event loop."""
        with self._in_their_words():
            return self.prepare_picture(source)

    def complete(self, request: RolloutRequest, picture: SourceImage) -> SessionRequest:
        """Tokenize the prompt and read what files a checked request names; not for an event loop.

        Raises:
            InvalidRequestError: for a camera that cannot be read or does not fit, or a picture
                whose shape makes no video.
        """
        policy = self.policy
        with self._in_their_words():
            prompt = self.tokenize(request.prompt)
            geometry = request.geometry or policy.geometry
            if geometry is None:
                geometry = _size_of_picture(picture, policy.limits.area)
                _require_fit(geometry, policy)
            return SessionRequest(
                prompt=prompt,
                image=picture,
                height=geometry.height,
                width=geometry.width,
                num_chunks=request.num_chunks,
                seed=request.seed,
                camera=read_camera(_camera_of(request, policy)),
                output=_OUTPUT_KINDS.get(request.output_type, policy.array_output),
                flow_shift=request.extra_args.flow_shift,
                fps=request.fps or policy.limits.native_fps,
                generator_device=request.generator_device,
            )

    @contextmanager
    def _in_their_words(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError as error:
            raise renamed(error, self.names) from error


def _camera_of(request: RolloutRequest, policy: RequestPolicy) -> CameraChoice:
    path, script = request.extra_args.action_path, request.extra_args.camera_action_script
    if path is None and script is None:
        if policy.allow_live_camera:
            return LiveCamera()
        raise InvalidRequestError(
            "needs action_path or camera_action_script: no live worlds are served here; whoever "
            "runs the server adds them with --diffusion-streaming-output (streaming_output: true)",
            field="extra_args",
        )
    name = "action_path" if script is None else "camera_action_script"
    if path is not None and script is not None:
        raise InvalidRequestError(
            "excludes action_path; give one of both", field=f"extra_args.{name}"
        )
    num_chunks = request.num_chunks
    if num_chunks is None:
        raise InvalidRequestError(
            "has a fixed length and excludes an unbounded session", field=f"extra_args.{name}"
        )
    if script is not None:
        return _fitting(script, num_chunks)
    if policy.action_root is None:
        raise InvalidRequestError(
            "no trusted root is configured; set model_config.lingbot_action_root or "
            "VLLM_OMNI_LINGBOT_ACTION_ROOT",
            field="extra_args.action_path",
        )
    return RecordedPath(policy.action_root, str(path), pixel_frames_of(num_chunks))


def _fitting(script: ScriptedKeys, num_chunks: int) -> ScriptedKeys:
    if len(script.chunks) != num_chunks:
        raise InvalidRequestError(
            f"needs {num_chunks} chunks for num_frames {pixel_frames_of(num_chunks)}, got "
            f"{len(script.chunks)}",
            field="extra_args.camera_action_script",
        )
    return script


def _with_defaults(
    given: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """Fill what a request leaves out; a length has no default where there is no end."""
    asked = {name: value for name, value in given.items() if not _is_unsaid(name, value)}
    filled = {**defaults, **asked}
    if given.get("unbounded") and "num_frames" not in asked:
        filled.pop("num_frames", None)
    extra, base = asked.get("extra_args"), defaults.get("extra_args")
    if isinstance(extra, Mapping) and isinstance(base, Mapping):
        filled["extra_args"] = {**base, **extra}
    return filled


def _is_unsaid(name: str, value: object) -> bool:
    # 1 is what the parameters of the Python API hold before anybody sets a length.
    return value is None or (name == "num_frames" and type(value) is int and value == 1)


def _check_fixed(request: RolloutRequest, limits: RequestLimits) -> None:
    """Settings that exist for other models and must have the one value that fits this one."""
    for name, value, needed in (
        ("num_inference_steps", request.num_inference_steps, limits.inference_steps),
        ("max_sequence_length", request.max_sequence_length, limits.max_sequence_length),
        ("num_outputs_per_prompt", request.num_outputs_per_prompt, 1),
    ):
        if value not in {None, needed}:
            raise InvalidRequestError(f"must be {needed}, got {value}", field=name)


def _check_length(request: RolloutRequest) -> None:
    if request.unbounded:
        if request.num_frames is not None:
            raise InvalidRequestError(
                f"must not be given for an unbounded session, got {request.num_frames}",
                field="num_frames",
            )
    elif request.num_frames is None:
        endless = (
            "" if request.unbounded is None else "; or give unbounded: true for an endless world"
        )
        raise InvalidRequestError(
            "is required: a rollout has 9 + 12k pixel frames (9, 21, 33, 45, ...); none was given, "
            f"and 1 counts as none{endless}",
            field="num_frames",
        )
    else:
        chunks_of(request.num_frames)


def _check_size(request: RolloutRequest, policy: RequestPolicy) -> None:
    if (request.height is None) != (request.width is None):
        raise InvalidRequestError(
            f"give both height and width or neither, got height {request.height} and width "
            f"{request.width}",
            field="height" if request.height is None else "width",
        )
    geometry = request.geometry or policy.geometry
    if geometry is not None:
        _require_fit(geometry, policy)


def _require_fit(geometry: VideoGeometry, policy: RequestPolicy) -> None:
    try:
        policy.parallel.check_geometry(geometry)
    except UnsupportedParallelismError as error:
        raise InvalidRequestError(str(error), field="height") from error
    pixels = geometry.height * geometry.width
    if policy.max_pixels is not None and pixels > policy.max_pixels:
        raise InvalidRequestError(
            f"{geometry} has {pixels} pixels, at most {policy.max_pixels} are served "
            "(--max-generated-image-size)",
            field="height",
        )


def _size_of_picture(picture: SourceImage, area: int) -> VideoGeometry:
    """The picture's shape at about ``area`` pixels, in steps of 16."""
    pixels = picture.signed if picture.rgb is None else picture.rgb
    assert pixels is not None, "a SourceImage holds one of two arrays"
    rows, columns = pixels.shape[:2]
    aspect = rows / columns
    height = round(math.sqrt(area * aspect) // 8 // 2 * 2) * 8
    width = round(math.sqrt(area / aspect) // 8 // 2 * 2) * 8
    if min(height, width) < PIXELS_PER_TOKEN or max(height, width) > MAX_SIDE:
        raise InvalidRequestError(
            f"a picture of {columns}x{rows} would make a video of {width}x{height}; give height "
            f"and width between {PIXELS_PER_TOKEN} and {MAX_SIDE}",
            field="height",
        )
    return VideoGeometry(height, width)
