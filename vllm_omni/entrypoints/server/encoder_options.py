"""The part of the H.264 encoder's configuration that a client may choose."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni.errors import InvalidRequestError

PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium")
TUNES = ("zerolatency", "film", "animation", "grain", "stillimage", "fastdecode", "psnr", "ssim")
MIN_CRF, MAX_CRF = 1.0, 51.0
MIN_BITRATE_BPS, MAX_BITRATE_BPS = 10_000, 200_000_000
FIELD = "extra_params.video_codec_options"

_ALLOWED = ("preset", "crf", "tune", "bitrate")
_BITRATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmM]?)")
_BITRATE_SCALE = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Speed and quality of the encoder.

    Attributes:
        preset: speed against size, one of :data:`PRESETS`.
        crf: constant quality, lower is better; ``None`` where ``bitrate_bps`` rules. 0 is not
            offered: lossless H.264 needs a profile that browsers do not decode.
        tune: what to tune for besides latency, one of :data:`TUNES`. Latency is always tuned
            for: any other setting would hold back frames of a chunk.
        bitrate_bps: mean bits per second, or ``None``.
    """

    preset: str = "ultrafast"
    crf: float | None = 18.0
    tune: str = "zerolatency"
    bitrate_bps: int | None = None

    def ffmpeg_options(self) -> dict[str, str]:
        """Options of FFmpeg's libx264 encoder, except the bit rate."""
        tune = "zerolatency" if self.tune == "zerolatency" else f"{self.tune},zerolatency"
        options = {"preset": self.preset, "tune": tune}
        if self.crf is not None:
            options["crf"] = f"{self.crf:g}"
        return options


def parse_encoder_options(raw: object) -> EncoderOptions:
    """Options of a client's ``video_codec_options`` object, whose values are strings or numbers.

    Raises:
        InvalidRequestError: unknown option, value outside its list or range, or both ``crf`` and
            ``bitrate``.
    """
    if not isinstance(raw, Mapping):
        raise InvalidRequestError(
            f"must be an object of {', '.join(_ALLOWED)}, got {type(raw).__name__}", field=FIELD
        )
    unknown = sorted(str(name) for name in raw if name not in _ALLOWED)
    if unknown:
        raise InvalidRequestError(
            f"only {', '.join(_ALLOWED)} can be set, got {', '.join(unknown)[:100]}", field=FIELD
        )
    if "crf" in raw and "bitrate" in raw:
        raise InvalidRequestError("give crf or bitrate, not both", field=FIELD)
    defaults = EncoderOptions()
    bitrate_bps = _bitrate(raw["bitrate"]) if "bitrate" in raw else None
    crf = defaults.crf if bitrate_bps is None else None
    return EncoderOptions(
        preset=_choice(raw, "preset", PRESETS, defaults.preset),
        crf=_crf(raw["crf"]) if "crf" in raw else crf,
        tune=_choice(raw, "tune", TUNES, defaults.tune),
        bitrate_bps=bitrate_bps,
    )


def _choice(raw: Mapping[str, object], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = raw.get(name, default)
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError(
            f"must be one of {', '.join(allowed)}, got {value!r:.60}", field=f"{FIELD}.{name}"
        )
    return value


def _crf(value: object) -> float:
    number = _number(value)
    if number is None or not MIN_CRF <= number <= MAX_CRF:
        raise InvalidRequestError(
            f"must be a number from {MIN_CRF:g} to {MAX_CRF:g}, got {value!r:.60}",
            field=f"{FIELD}.crf",
        )
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", str(value))
    return None if match is None else float(match.group())


def _bitrate(value: object) -> int:
    match = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        match = _BITRATE.fullmatch(str(value))
    bits = int(float(match[1]) * _BITRATE_SCALE[match[2].lower()]) if match else 0
    if not MIN_BITRATE_BPS <= bits <= MAX_BITRATE_BPS:
        raise InvalidRequestError(
            f"must be bits per second from {MIN_BITRATE_BPS} to {MAX_BITRATE_BPS} (a number, or "
            f"text such as 800k or 4M), got {value!r:.60}",
            field=f"{FIELD}.bitrate",
        )
    return bits
