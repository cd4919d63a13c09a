"""The part of the H.264 encoder's configuration that is the client's choice."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from vllm_omni.inputs.bounds import NUMBER
from vllm_omni.inputs.checking import Checked

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
    """Speed and quality of the encoder.

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
