"""``session.start``, the first message of a client, and what it resolves to."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from vllm_omni.config.deploy import INFERENCE_STEPS
from vllm_omni.diffusion.geometry import chunks_of, lengths_near
from vllm_omni.entrypoints.server.encoder_options import EncoderOptions, parse_encoder_options
from vllm_omni.entrypoints.server.wire import (
    NOT_BOOL,
    NotNegative,
    Positive,
    Seed,
    Text,
    Wire,
    refuse,
)
from vllm_omni.errors import InvalidRequestError

DEFAULT_FPS = 24.0
"""Playback rate and time base of interactions when a client names none."""
_OWN_FIELDS = frozenset({"type", "format", "sampling_params", "extra_params"})
_FIXED_LENGTH_PARAMS = ("action_path", "camera_action_script")

Fps = Annotated[float, Field(ge=1, le=1000), NOT_BOOL]
Guidance = Annotated[float, Field(ge=0, le=20), NOT_BOOL]


class ImageReference(Wire):
    """The first picture of the world: exactly one, by URL."""

    image_url: Text = Field(description="`data:` URL or http(s) URL")

    @model_validator(mode="before")
    @classmethod
    def _by_url_only(cls, raw: object) -> object:
        if isinstance(raw, list):
            raise refuse("must be one object with image_url, not a list")
        if isinstance(raw, dict) and raw.get("file_id") is not None:
            raise refuse("file_id is not supported; give image_url")
        return raw


class VideoParams(Wire):
    """Fall-back of the flat fields of the same names."""

    width: Positive | None = None
    height: Positive | None = None
    num_frames: Positive | None = None
    fps: Fps | None = None


@dataclass(frozen=True, slots=True)
class StartParams:
    """A start message with every alternative spelling resolved.

    Attributes:
        width: pixels, ``None`` together with ``height`` where the client named no size.
        num_frames: pixel frames of the rollout; ``None`` where the client named no length.
        fps: pixel frames per second of the video and time base of interactions.
        extra_args: model options, ``flow_shift`` among them; what concerns the encoder is gone.
    """

    prompt: str
    image_url: str
    width: int | None
    height: int | None
    num_frames: int | None
    unbounded: bool
    fps: float
    seed: int | None
    extra_args: Mapping[str, object]
    encoder: EncoderOptions
    queue: bool
    max_lead_ms: float | None


class SessionStart(Wire):
    """First message of a client: opens the world."""

    type: Literal["session.start"]
    format: Literal["m4s"] = "m4s"
    prompt: str = Field(description="what the world shows")
    model: str | None = Field(None, description="served name; omit to skip the check")
    image_reference: ImageReference | None = Field(None, description="first picture; required")
    width: Positive | None = Field(None, description="pixels; applied only with height")
    height: Positive | None = Field(None, description="pixels; applied only with width")
    size: str | None = Field(
        None, pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$", description="WxH; overrides both"
    )
    num_frames: Positive | None = Field(
        None, description="pixel frames, 9 + 12k; required unless unbounded"
    )
    fps: Fps | None = Field(None, description="playback rate and time base of interactions; 24")
    seconds: str | None = Field(
        None,
        pattern=r"^[1-9][0-9]{0,5}$",
        description="length at fps, where seconds x fps is 9 + 12k: never at 16, 24 or 30 fps",
    )
    seed: Seed | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=200), NOT_BOOL] | None = Field(
        None, description="the model accepts 4"
    )
    guidance_scale: Guidance | None = Field(None, description="no effect")
    guidance_scale_2: Guidance | None = Field(None, description="no effect")
    true_cfg_scale: Guidance | None = Field(None, description="no effect")
    boundary_ratio: Annotated[float, Field(ge=0, le=1), NOT_BOOL] | None = Field(
        None, description="no effect"
    )
    flow_shift: Annotated[float, Field(gt=0), NOT_BOOL] | None = Field(
        None, description="overrides the model's"
    )
    negative_prompt: str | None = Field(None, description="no effect")
    quality: Literal["lossless", "high"] | None = Field(None, description="no effect")
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
    num_outputs_per_prompt: Annotated[int, Field(ge=1, le=10), NOT_BOOL] = Field(
        1, description="the model accepts 1"
    )
    user: str | None = Field(None, description="no effect")
    aspect_ratio: str | None = Field(None, description="no effect")
    short_edge: Positive | None = Field(None, description="no effect")
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
        if self._num_frames() is not None:
            raise refuse("unbounded excludes num_frames and seconds; leave one of them out")
        for name in _FIXED_LENGTH_PARAMS:
            if self.extra_params.get(name) is not None:
                raise refuse(f"unbounded excludes extra_params.{name}, whose length is fixed")
        return self

    def config(self) -> dict[str, Any]:
        """The request as ``video.start`` echoes it: without nulls."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"type", "format"})

    def check_model(self, served_names: tuple[str, ...]) -> None:
        """Refuse a model name that is not served; no name passes."""
        if self.model is not None and self.model not in served_names:
            raise InvalidRequestError(
                f"{self.model!r:.100} is not served here; served: {', '.join(served_names)}",
                field="model",
            )

    def resolved(self) -> StartParams:
        """Everything that the fields mean together.

        Raises:
            InvalidRequestError: a well-formed request that this model cannot serve.
        """
        self._refuse_unsupported()
        width, height = self._size()
        return StartParams(
            prompt=self.prompt,
            image_url=self._image_url(),
            width=width,
            height=height,
            num_frames=self._length(),
            unbounded=self.unbounded,
            fps=self._fps(),
            seed=self.seed,
            extra_args=self._extra_args(),
            encoder=self._encoder(),
            queue=self.queue,
            max_lead_ms=self.max_lead_ms,
        )

    def _refuse_unsupported(self) -> None:
        if not self.prompt.strip():
            raise InvalidRequestError("must not be blank", field="prompt")
        if self.num_inference_steps not in {None, INFERENCE_STEPS}:
            raise InvalidRequestError(
                f"must be {INFERENCE_STEPS} for this model, got {self.num_inference_steps}",
                field="num_inference_steps",
            )
        if self.num_outputs_per_prompt != 1:
            raise InvalidRequestError(
                f"must be 1 for a stream, got {self.num_outputs_per_prompt}",
                field="num_outputs_per_prompt",
            )
        if self.lora is not None:
            raise InvalidRequestError("adapters are not supported by this model", field="lora")
        if self.extra_params.get("preencode_mp4"):
            raise InvalidRequestError(
                "is not possible for a stream; leave it out", field="extra_params.preencode_mp4"
            )

    def _image_url(self) -> str:
        if self.image_reference is None:
            raise InvalidRequestError(
                "this model needs a first picture: give {image_url: data: or http(s) URL}, or in a "
                "form the file input_reference",
                field="image_reference",
            )
        return self.image_reference.image_url

    def _size(self) -> tuple[int | None, int | None]:
        if self.size is not None:
            width, height = self.size.split("x")
            return int(width), int(height)
        width, height = self.width, self.height
        if self.video_params is not None:
            width = self.video_params.width if width is None else width
            height = self.video_params.height if height is None else height
        return (None, None) if width is None or height is None else (width, height)

    def _fps(self) -> float:
        if self.fps is not None:
            return self.fps
        if self.video_params is not None and self.video_params.fps is not None:
            return self.video_params.fps
        return DEFAULT_FPS

    def _length(self) -> int | None:
        """Pixel frames; a length in seconds is refused in the words of the client."""
        frames = self._num_frames()
        if frames is None or self._named_frames() is not None:
            return frames
        try:
            chunks_of(frames)
        except InvalidRequestError:
            raise InvalidRequestError(
                f"{self.seconds} s x {self._fps():g} fps makes {frames} pixel frames, but a "
                f"rollout has 9 + 12k; give num_frames instead, nearest: {lengths_near(frames)}",
                field="seconds",
            ) from None
        return frames

    def _num_frames(self) -> int | None:
        named = self._named_frames()
        if named is not None or self.seconds is None:
            return named
        return int(int(self.seconds) * self._fps())

    def _named_frames(self) -> int | None:
        if self.num_frames is not None:
            return self.num_frames
        return None if self.video_params is None else self.video_params.num_frames

    def _extra_args(self) -> Mapping[str, object]:
        mine = {"preencode_mp4", "video_codec_options"}
        args = {name: value for name, value in self.extra_params.items() if name not in mine}
        if self.flow_shift is not None:
            args["flow_shift"] = self.flow_shift
        return MappingProxyType(args)

    def _encoder(self) -> EncoderOptions:
        raw = self.extra_params.get("video_codec_options")
        return EncoderOptions() if raw is None else parse_encoder_options(raw)
