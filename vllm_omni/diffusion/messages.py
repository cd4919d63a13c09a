"""Every object that crosses a process boundary between engine and workers. No torch.

The engine parses client input into these; a worker never sees anything else.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8
from pydantic import BeforeValidator, Field, model_validator

from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.inputs.checking import NUMBER, Checked


class OutputKind(StrEnum):
    """What a chunk hands out."""

    UINT8 = "uint8"
    """RGB, uint8 ``[pixel_frames, height, width, 3]``."""
    FLOAT = "float"
    """RGB, float32 in [0, 1], same layout."""
    LATENT = "latent"
    """Model-space latents, float32 ``[1, 16, 3, height / 8, width / 8]``; nothing is decoded."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """A decoded picture, upright and opaque: exactly one of the two arrays is set.

    Attributes:
        rgb: 8-bit sRGB.
        signed: already mapped to [-1, 1] (tensor input).
    """

    rgb: UInt8[np.ndarray, "height width 3"] | None = None
    signed: Float32[np.ndarray, "height width 3"] | None = None


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as a client wrote it, and as the model reads it.

    Attributes:
        text: whitespace already normalised.
        ids: of its tokens, without padding; none where the model reads the text itself.
    """

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedCamera:
    """A recorded path: one camera-to-world pose and one intrinsics row per pixel frame.

    Intrinsics are fx, fy, cx, cy at 832x480 reference pixels. Translations are normalised by
    the longest step of the whole clip. Poses are float32 where that keeps their motion, else
    float64 about the first one.
    """

    poses: Float[np.ndarray, "pixel_frames 4 4"]
    intrinsics: Float32[np.ndarray, "pixel_frames 4"]


@dataclass(frozen=True, slots=True)
class ScriptedKeys:
    """Keys held in each latent frame of each chunk (``w a s d i j k l``, lower case)."""

    chunks: tuple[tuple[frozenset[str], frozenset[str], frozenset[str]], ...]


@dataclass(frozen=True, slots=True)
class LiveCamera:
    """The camera follows interactions; each plan carries its poses."""


CameraSource = RecordedCamera | ScriptedKeys | LiveCamera


DEFAULT_CRF = 18.0
_BITRATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmM]?)")
_BITRATE_SCALE = {"": 1, "k": 1_000, "m": 1_000_000}

_NVENC_PRESETS = {
    "ultrafast": "p1", "superfast": "p2", "veryfast": "p3", "faster": "p4", "fast": "p5",
    "medium": "p6",
}  # fmt: skip


def _bits(value: object) -> object:
    match = _BITRATE.fullmatch(value) if isinstance(value, str) else None
    return int(float(match[1]) * _BITRATE_SCALE[match[2].lower()]) if match else value


class EncoderOptions(Checked):
    """The part of the H.264 encoder's configuration that is the client's choice.

    Attributes:
        preset: speed against size.
        crf: constant quality, lower is better, 18 by default; ``None`` where ``bitrate`` rules.
            0 is not offered: lossless H.264 needs a profile that browsers do not decode.
        tune: what to tune for besides latency. Latency is always tuned for: any other setting
            would hold back frames of a chunk.
        bitrate: mean bits per second, as a number or as text such as 800k or 4M.
    """

    preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium"] = "ultrafast"
    crf: Annotated[float, Field(strict=True, ge=1, le=51), NUMBER] | None = None
    tune: Literal[
        "zerolatency", "film", "animation", "grain", "stillimage", "fastdecode", "psnr", "ssim"
    ] = "zerolatency"
    bitrate: (
        Annotated[int, Field(strict=True, ge=10_000, le=200_000_000), BeforeValidator(_bits)] | None
    ) = None

    @model_validator(mode="after")
    def _one_rule(self) -> "EncoderOptions":
        if self.crf is not None and self.bitrate is not None:
            raise ValueError("give crf or bitrate, not both")
        return self

    def ffmpeg_options(self) -> dict[str, str]:
        """Options of FFmpeg's libx264 encoder, except the bit rate."""
        tune = "zerolatency" if self.tune == "zerolatency" else f"{self.tune},zerolatency"
        options = {"preset": self.preset, "tune": tune}
        if self.bitrate is None:
            options["crf"] = f"{DEFAULT_CRF if self.crf is None else self.crf:g}"
        return options

    def nvenc_options(self) -> dict[str, str]:
        """Options of FFmpeg's h264_nvenc encoder, except the bit rate; it knows no such tunes."""
        options = {
            "preset": _NVENC_PRESETS[self.preset],
            "tune": "ull",
            "zerolatency": "1",
            "delay": "0",
            "rc": "constqp" if self.bitrate is None else "cbr",
        }
        if self.bitrate is None:
            options["qp"] = f"{DEFAULT_CRF if self.crf is None else self.crf:.0f}"
        return options


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """How the root rank makes the H.264 of a session.

    Attributes:
        codec: FFmpeg's name of the encoder; libx264 stands in for one that does not open.
    """

    options: EncoderOptions
    codec: str


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A validated request for one session.

    Attributes:
        num_chunks: length of the rollout, ``None`` until stopped.
        flow_shift: of this request, ``None`` for the model's.
        fps: playback rate in pixel frames per second; the time base of interactions.
        generator_device: where noise is drawn, ``None`` for the model's device.
        video: of what is handed out in place of uint8 pixels, ``None`` for pixels; needs workers
            that encode (``encode_on``).
    """

    prompt: TokenizedPrompt
    image: SourceImage
    height: int
    width: int
    num_chunks: int | None
    seed: int
    camera: CameraSource
    output: OutputKind = OutputKind.UINT8
    flow_shift: float | None = None
    fps: float = 16.0
    generator_device: str | None = None
    video: VideoSettings | None = None

    @property
    def geometry(self) -> VideoGeometry:
        """Size of the video, with what follows from it in latents and tokens."""
        return VideoGeometry(self.height, self.width)


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Move the text condition towards a prompt: ``e += weight * (embed(prompt) - e)``.

    A linear blend over n chunks is the weights 1/n, 1/(n-1), ..., 1; a weight of 1 lands exactly.
    """

    prompt: TokenizedPrompt
    weight: float


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What the engine tells all ranks to do for one chunk.

    Attributes:
        poses: camera-to-world pose of each latent frame of the chunk, in the session's own
            frame, for a live camera; ``None`` for the other sources.
    """

    session_id: str
    chunk_index: int
    poses: Float64[np.ndarray, "3 4 4"] | None = None
    prompt: PromptStep | None = None


@dataclass(frozen=True, slots=True)
class ChunkTimings:
    """Milliseconds of each part of a chunk on the root rank, as the device ran it.

    Attributes:
        condition_ms: of this chunk's, where it was made in this chunk, and of the next one's, where
            it was made beside the commit.
        commit_ms: until the commit forward was done, or queued where the device has a queue.
        encode_ms: from pixels on the host to their video, where the root rank makes it; told with
            the chunk alone.
    """

    condition_ms: float = 0.0
    camera_ms: float = 0.0
    probes_ms: float = 0.0
    decode_ms: float = 0.0
    commit_ms: float = 0.0
    encode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """One finished chunk, on the root rank.

    Attributes:
        data: layout of the request's :class:`OutputKind`; for a request of video the bytes of a
            fragmented MP4, uint8 ``[bytes]``, none if the encoder failed.
        ready_s: ``time.monotonic()`` when the pixels were there for the engine's process.
    """

    session_id: str
    chunk_index: int
    data: UInt8[np.ndarray, "..."] | Float[np.ndarray, "..."]
    ready_s: float
    timings: ChunkTimings = field(default_factory=ChunkTimings)


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """What a worker group can hold, said once after loading.

    Attributes:
        sessions: sessions of the configured size that fit at once.
        num_pages: pages of the KV pool.
        page_tokens: tokens of one page.
        page_bytes: bytes of one page on one rank, all layers.
        window_frames: latent frames that a session's window holds.
        quarantined: failures whose memory this process keeps until it ends.
        attention_kernel: name of the kernel that attention runs.
    """

    sessions: int
    num_pages: int
    page_tokens: int
    page_bytes: int
    window_frames: int
    quarantined: int = 0
    attention_kernel: str = "unknown"

    def pages_for(self, tokens_per_frame: int) -> int:
        """Pages that a session of this many tokens per latent frame takes."""
        return -(-self.window_frames * tokens_per_frame // self.page_tokens)
