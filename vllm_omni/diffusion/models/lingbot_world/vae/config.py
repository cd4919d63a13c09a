"""The Wan VAE's configuration, read from the checkpoint's ``vae/config.json``."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field, StrictBool, model_validator

from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, TEMPORAL_FACTOR
from vllm_omni.errors import CheckpointError, InvalidRequestError
from vllm_omni.inputs.checking import PositiveInt, validate
from vllm_omni.logger import get_logger
from vllm_omni.wording import shown

logger = get_logger(__name__)

CLASS_NAME = "AutoencoderKLWan"
COLOURS = 3
LEVELS = 4
"""Resolutions of the coder: three halvings make the factor of eight."""

_FIXED: Mapping[str, object] = {
    "attn_scales": [],
    "is_residual": False,
    "patch_size": None,
    "in_channels": COLOURS,
    "out_channels": COLOURS,
    "scale_factor_temporal": TEMPORAL_FACTOR,
    "scale_factor_spatial": SPATIAL_FACTOR,
}
"""Optional fields and the value of each in the Wan 2.1 kind."""


class VaeConfig(BaseModel, frozen=True, allow_inf_nan=False):
    """A variational auto-encoder of the Wan 2.1 kind, of any consistent width.

    Attributes:
        base_dim: channels of the encoder at full resolution, before ``dim_mult``.
        decoder_base_dim: the same for the decoder.
        z_dim: latent channels.
        dim_mult: channel multiplier of each of the four resolutions, finest first.
        num_res_blocks: residual blocks per encoder level; the decoder has one more.
        temperal_downsample: whether time is halved after each level but the last (the
            checkpoint's own spelling).
        latents_mean: mean of each latent channel over the training data.
        latents_std: its standard deviation.
    """

    base_dim: PositiveInt
    decoder_base_dim: PositiveInt
    z_dim: PositiveInt
    dim_mult: Annotated[tuple[PositiveInt, ...], Field(min_length=LEVELS, max_length=LEVELS)]
    num_res_blocks: PositiveInt
    temperal_downsample: Annotated[
        tuple[StrictBool, ...], Field(min_length=LEVELS - 1, max_length=LEVELS - 1)
    ]
    latents_mean: tuple[Annotated[float, Field(strict=True)], ...]
    latents_std: tuple[Annotated[float, Field(strict=True, gt=0)], ...]

    @model_validator(mode="after")
    def _check_together(self) -> "VaeConfig":
        channels = [self.decoder_base_dim * multiplier for multiplier in self.dim_mult[1:]]
        # Each upsampling halves the channels, so every level but the finest needs an even number.
        if any(count % 2 for count in channels):
            raise _wrong("dim_mult", "make even channels at all levels but the finest", channels)
        if 2 ** sum(self.temperal_downsample) != TEMPORAL_FACTOR:
            needed = f"shorten time {TEMPORAL_FACTOR} times: two of them true"
            raise _wrong("temperal_downsample", needed, self.temperal_downsample)
        for name, values in (("mean", self.latents_mean), ("std", self.latents_std)):
            if len(values) != self.z_dim:
                raise _wrong(f"latents_{name}", f"have z_dim = {self.z_dim} numbers", values)
        return self

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> "VaeConfig":
        """Read ``vae/config.json``; keys that do not shape the network are ignored.

        Raises:
            CheckpointError: if it is not the Wan 2.1 kind, or its numbers contradict each other.
        """
        _refuse_other_kinds(raw)
        if raw.get("decoder_base_dim") is None:
            raw = {**raw, "decoder_base_dim": raw.get("base_dim")}
        try:
            return validate(cls, raw)
        except InvalidRequestError as error:
            raise _refusal(str(error)) from None

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Encoder channels: of the first convolution, then of each level, finest first."""
        return tuple(self.base_dim * m for m in (1, *self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Decoder channels: of the first convolution, then of each level, coarsest first."""
        return tuple(self.decoder_base_dim * m for m in (self.dim_mult[-1], *self.dim_mult[::-1]))


def _refuse_other_kinds(raw: Mapping[str, object]) -> None:
    if raw.get("_class_name") != CLASS_NAME:
        raise _refusal(str(_wrong("_class_name", f"be {CLASS_NAME}", raw.get("_class_name"))))
    for name, wanted in _FIXED.items():
        if name in raw and _plain(raw[name]) != wanted:
            raise _refusal(str(_wrong(name, f"be {shown(wanted)}", raw[name])))
    known = {*_FIXED, *VaeConfig.model_fields, "dropout"}
    unknown = [n for n in raw if not n.startswith("_") and n not in known]
    if unknown:
        logger.warning("vae/config.json: no effect: %s", ", ".join(sorted(unknown)))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _wrong(name: str, needed: str, got: object) -> ValueError:
    return ValueError(f"{name}: must {needed}, got {shown(got)}")


def _refusal(text: str) -> CheckpointError:
    return CheckpointError(
        f"vae/config.json: {text}; the checkpoint's VAE must be of the Wan 2.1 kind"
    )
