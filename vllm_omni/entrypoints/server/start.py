"""``session.start``, the first message of a client, and what its alternative spellings mean."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from vllm_omni.diffusion.geometry import nearest_length
from vllm_omni.diffusion.messages import EncoderOptions
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import (
    FlowShift,
    Fps,
    Frames,
    Guidance,
    Message,
    NotNegative,
    Outputs,
    PositiveInt,
    PromptText,
    Quality,
    Seed,
    Share,
    ShortText,
    Side,
    Steps,
    Text,
    told_seed,
    validate,
)
from vllm_omni.inputs.request import RolloutRequest
from vllm_omni.wording import refuse

DEFAULT_FPS = 24.0
"""Playback rate and time base of interactions when a client names none."""
NAMES = {"extra_args": "extra_params", "image": "image_reference"}
"""Fields of a request that messages know by another name."""
_ENCODER = "video_codec_options"
PREENCODED = "preencode_mp4"
"""Option of other models, which a stream refuses and a whole video ignores."""
_OWN_FIELDS = frozenset({"type", "format", "sampling_params", "extra_params"})
_FIXED_LENGTH_PARAMS = ("action_path", "camera_action_script")
_LIKE_THE_REQUEST = (
    "prompt", "negative_prompt", "seed", "num_inference_steps", "num_outputs_per_prompt",
    "guidance_scale", "guidance_scale_2", "true_cfg_scale", "boundary_ratio", "quality",
)  # fmt: skip
"""Fields whose value is that of the request."""


def _in_form(pattern: str, needed: str) -> tuple[AfterValidator, object]:
    """Annotations of text in a certain form: a check in words, and the form for the schema."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise refuse(needed)
        return text

    return AfterValidator(check), Field(json_schema_extra={"pattern": f"^{pattern}$"})


Size = Annotated[
    str,
    *_in_form(
        "[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", "must be WIDTHxHEIGHT in pixels, for example 832x480"
    ),
]
Seconds = Annotated[
    str, *_in_form("[1-9][0-9]{0,5}", 'must be whole seconds as text, for example "3"')
]


class ImageReference(Message):
    """The first picture of the world: exactly one, by URL."""

    image_url: Text = Field(description="`data:` URL or http(s) URL")

    @model_validator(mode="before")
    @classmethod
    def _by_url_only(cls, raw: object) -> object:
        if isinstance(raw, list):
            raise ValueError("must be one object with image_url, not a list")  # noqa: TRY004
        if isinstance(raw, dict) and raw.get("file_id") is not None:
            raise ValueError("file_id is not supported; give image_url")
        return raw


class VideoParams(Message):
    """Fall-back of the flat fields of the same names."""

    width: Side | None = None
    height: Side | None = None
    num_frames: Frames | None = None
    fps: Fps | None = None


class SessionStart(Message):
    """First message of a client: opens the world."""

    type: Literal["session.start"]
    format: Literal["m4s"] = "m4s"
    prompt: PromptText = Field(description="what the world shows")
    model: ShortText | None = Field(None, description="served name; omit to skip the check")
    image_reference: ImageReference | None = Field(None, description="first picture; required")
    width: Side | None = Field(None, description="pixels; applied only with height")
    height: Side | None = Field(None, description="pixels; applied only with width")
    size: Size | None = Field(None, description="WxH; overrides both")
    num_frames: Frames | None = Field(
        None, description="pixel frames, 9 + 12k; required unless unbounded"
    )
    fps: Fps | None = Field(
        None,
        description="playback rate and time base of interactions; 24, at which a chunk of 12 "
        "frames plays 500 ms; at the model's 16, 750 ms",
    )
    seconds: Seconds | None = Field(
        None,
        description="length, where num_frames is not given: the nearest that a rollout has "
        "(9 + 12k pixel frames) at fps, or else at the model's own rate",
    )
    seed: Seed | None = None
    num_inference_steps: Steps | None = Field(None, description="the model accepts 4")
    guidance_scale: Guidance | None = Field(None, description="no effect")
    guidance_scale_2: Guidance | None = Field(None, description="no effect")
    true_cfg_scale: Guidance | None = Field(None, description="no effect")
    boundary_ratio: Share | None = Field(None, description="no effect")
    flow_shift: FlowShift | None = Field(None, description="overrides the model's")
    negative_prompt: PromptText | None = Field(None, description="no effect")
    quality: Quality | None = Field(None, description="no effect")
    video_params: VideoParams | None = None
    lora: dict[str, JsonValue] | None = Field(None, description="refused: not supported")
    extra_params: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="model options: action_path, camera_action_script, flow_shift, "
        "video_codec_options {preset, crf, tune, bitrate}",
    )
    sampling_params: dict[str, JsonValue] | None = Field(
        None, description="fields named as above are lifted, the rest joins extra_params"
    )
    num_outputs_per_prompt: Outputs = Field(1, description="the model accepts 1")
    user: ShortText | None = Field(None, description="no effect")
    aspect_ratio: ShortText | None = Field(None, description="no effect")
    short_edge: PositiveInt | None = Field(None, description="no effect")
    start_time_seconds: NotNegative | None = Field(None, description="no effect")
    generate_sound: bool | None = Field(None, description="no effect")
    sound_duration: NotNegative | None = Field(None, description="no effect")
    enable_frame_interpolation: bool | None = Field(None, description="no effect")
    return_stage_metrics: bool | None = Field(None, description="no effect")
    queue: bool = Field(default=False, description="send session.queued while waiting")
    unbounded: bool = Field(default=False, description="run until session.stop")
    max_lead_ms: NotNegative | None = Field(
        None, description="how far generation may run ahead of playback at fps"
    )

    @model_validator(mode="before")
    @classmethod
    def _lift_sampling_params(cls, raw: object) -> object:
        if not isinstance(raw, dict) or not isinstance(raw.get("sampling_params"), dict):
            return raw
        lifted, rest = {}, {}
        for name, value in raw["sampling_params"].items():
            known = name in cls.model_fields and name not in _OWN_FIELDS
            (lifted if known else rest)[name] = value
        inner = rest.pop("extra_params", None)
        given = raw.get("extra_params")
        for extra in (inner, given):
            if extra is not None and not isinstance(extra, dict):
                return raw | {"extra_params": extra}
        present = {name: value for name, value in raw.items() if value is not None}
        return lifted | present | {"extra_params": rest | (inner or {}) | (given or {})}

    @field_validator("extra_params", mode="before")
    @classmethod
    def _no_extra_params(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _unbounded_has_no_length(self) -> "SessionStart":
        if not self.unbounded:
            return self
        if self.seconds is not None or self._named_frames() is not None:
            raise ValueError("unbounded excludes num_frames and seconds; leave one of them out")
        for name in _FIXED_LENGTH_PARAMS:
            if self.extra_params.get(name) is not None:
                raise ValueError(f"unbounded excludes extra_params.{name}, whose length is fixed")
        return self

    def config(self, request: RolloutRequest) -> dict[str, Any]:
        """The message as ``video.start`` echoes it: without nulls, with what the server chose.

        Args:
            request: what became of the message.
        """
        length = {} if self.rules_frames else {"num_frames": request.num_frames, "fps": request.fps}
        said = self.model_dump(mode="json", exclude_none=True, exclude={"type", "format"})
        return said | length | {"seed": told_seed(request.seed)}

    def check_model(self, served_names: tuple[str, ...]) -> None:
        """Refuse a model name that is not served; no name passes."""
        if self.model is not None and self.model not in served_names:
            raise InvalidRequestError(
                f"{self.model!r:.100} is not served here; served: {', '.join(served_names)}",
                field="model",
            )

    def rollout_fields(self, native_fps: float = DEFAULT_FPS) -> dict[str, object]:
        """Resolve alternative spellings into the values of a ``RolloutRequest``.

        Args:
            native_fps: playback rate of a length in seconds that comes without one.

        Raises:
            InvalidRequestError: for what no stream can do, and encoder options that are none.
        """
        fps = self._fps(DEFAULT_FPS if self.rules_frames else native_fps)
        if self.lora is not None:
            raise InvalidRequestError("adapters are not supported by this model", field="lora")
        if self.extra_params.get(PREENCODED):
            raise InvalidRequestError(
                "is not possible for a stream; leave it out", field=f"extra_params.{PREENCODED}"
            )
        self.encoder_options()
        width, height = self._size()
        return {
            **self.model_dump(include=set(_LIKE_THE_REQUEST)),
            "image": self.image_url or None,
            "width": width,
            "height": height,
            "num_frames": self._num_frames(fps),
            "fps": fps,
            "output_type": "pil",
            "extra_args": self._extra_args(),
        }

    @property
    def image_url(self) -> str:
        """Where the first picture is; blank where the client named none."""
        return "" if self.image_reference is None else self.image_reference.image_url

    def encoder_options(self) -> EncoderOptions:
        """How the client wants its video encoded.

        Raises:
            InvalidRequestError: unknown option, or a value outside its list or range.
        """
        raw = self.extra_params.get(_ENCODER)
        field = f"extra_params.{_ENCODER}"
        if raw is None:
            return EncoderOptions()
        if not isinstance(raw, dict):
            raise InvalidRequestError(
                f"must be an object of {', '.join(EncoderOptions.model_fields)}", field=field
            )
        return validate(EncoderOptions, raw, written=True, within=field)

    def _size(self) -> tuple[int | None, int | None]:
        if self.size is not None:
            width, height = self.size.split("x")
            return int(width), int(height)
        width, height = self.width, self.height
        if self.video_params is not None:
            width = self.video_params.width if width is None else width
            height = self.video_params.height if height is None else height
        return (None, None) if width is None or height is None else (width, height)

    def _fps(self, default: float) -> float:
        if self.fps is not None:
            return self.fps
        if self.video_params is not None and self.video_params.fps is not None:
            return self.video_params.fps
        return default

    @property
    def rules_frames(self) -> bool:
        """Whether the length does not follow from ``seconds``."""
        return self.seconds is None or self._named_frames() is not None

    def _num_frames(self, fps: float) -> int | None:
        if self.rules_frames or self.seconds is None:
            return self._named_frames()
        return nearest_length(int(self.seconds) * fps)

    def _named_frames(self) -> int | None:
        if self.num_frames is not None:
            return self.num_frames
        return None if self.video_params is None else self.video_params.num_frames

    def _extra_args(self) -> Mapping[str, object]:
        mine = {PREENCODED, _ENCODER}
        args = {name: value for name, value in self.extra_params.items() if name not in mine}
        return args if self.flow_shift is None else args | {"flow_shift": self.flow_shift}
