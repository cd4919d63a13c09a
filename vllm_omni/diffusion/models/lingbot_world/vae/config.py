"""The Wan VAE's configuration, read from the checkpoint's ``vae/config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, TEMPORAL_FACTOR
from vllm_omni.errors import CheckpointError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

CLASS_NAME = "AutoencoderKLWan"
COLOURS = 3
LEVELS = 4
"""Resolutions of the coder: three halvings make the factor of eight."""

_FIXED: Mapping[str, tuple[object, ...]] = {
    "attn_scales": ([],),
    "is_residual": (False,),
    "patch_size": (None,),
    "in_channels": (COLOURS,),
    "out_channels": (COLOURS,),
    "scale_factor_temporal": (TEMPORAL_FACTOR,),
    "scale_factor_spatial": (SPATIAL_FACTOR,),
}
"""Optional fields and the values that the Wan 2.1 kind may give them."""
_READ = frozenset({
    "base_dim", "decoder_base_dim", "z_dim", "dim_mult", "num_res_blocks", "temperal_downsample",
    "latents_mean", "latents_std", "dropout",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class VaeConfig:
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

    base_dim: int
    decoder_base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> "VaeConfig":
        """Read ``vae/config.json``; keys that do not shape the network are ignored.

        Raises:
            CheckpointError: if it is not the Wan 2.1 kind, or its numbers contradict each other.
        """
        _refuse_other_kinds(fields)
        base_dim = _positive(fields, "base_dim")
        decoder_base_dim = base_dim
        if fields.get("decoder_base_dim") is not None:
            decoder_base_dim = _positive(fields, "decoder_base_dim")
        z_dim = _positive(fields, "z_dim")
        return cls(
            base_dim=base_dim,
            decoder_base_dim=decoder_base_dim,
            z_dim=z_dim,
            dim_mult=_dim_mult(fields, decoder_base_dim),
            num_res_blocks=_positive(fields, "num_res_blocks"),
            temperal_downsample=_temporal_levels(fields),
            latents_mean=_statistics(fields, "latents_mean", z_dim),
            latents_std=_statistics(fields, "latents_std", z_dim),
        )

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Encoder channels: of the first convolution, then of each level, finest first."""
        return tuple(self.base_dim * m for m in (1, *self.dim_mult))

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Decoder channels: of the first convolution, then of each level, coarsest first."""
        return tuple(self.decoder_base_dim * m for m in (self.dim_mult[-1], *self.dim_mult[::-1]))


def _refuse_other_kinds(fields: Mapping[str, object]) -> None:
    if fields.get("_class_name") != CLASS_NAME:
        raise _mismatch("_class_name", expected=CLASS_NAME, got=fields.get("_class_name"))
    for name, allowed in _FIXED.items():
        if name in fields and _plain(fields[name]) not in allowed:
            raise _mismatch(name, expected=allowed[0], got=fields[name])
    unknown = [n for n in fields if not n.startswith("_") and n not in _FIXED and n not in _READ]
    if unknown:
        logger.warning("vae/config.json: no effect: %s", ", ".join(sorted(unknown)))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _dim_mult(fields: Mapping[str, object], decoder_base_dim: int) -> tuple[int, ...]:
    values = _list(fields, "dim_mult", LEVELS)
    if not all(_is_positive_int(value) for value in values):
        raise _mismatch("dim_mult", expected=f"{LEVELS} positive integers", got=values)
    multipliers = tuple(int(str(value)) for value in values)
    # Each upsampling halves the channels, so every level but the finest needs an even number.
    if any(decoder_base_dim * multiplier % 2 for multiplier in multipliers[1:]):
        raise _mismatch(
            "dim_mult", expected=f"even channels with base_dim {decoder_base_dim}", got=values
        )
    return multipliers


def _temporal_levels(fields: Mapping[str, object]) -> tuple[bool, ...]:
    values = _list(fields, "temperal_downsample", LEVELS - 1)
    levels = tuple(value is True for value in values)
    booleans = all(isinstance(value, bool) for value in values)
    if not booleans or 2 ** sum(levels) != TEMPORAL_FACTOR:
        raise _mismatch(
            "temperal_downsample",
            expected=f"{LEVELS - 1} booleans, two of them true (temporal factor {TEMPORAL_FACTOR})",
            got=values,
        )
    return levels


def _statistics(fields: Mapping[str, object], name: str, z_dim: int) -> tuple[float, ...]:
    values = _list(fields, name, z_dim)
    numbers = tuple(float(v) for v in values if isinstance(v, int | float))
    if len(numbers) != z_dim or (name == "latents_std" and min(numbers) <= 0):
        raise _mismatch(name, expected=f"{z_dim} numbers, standard deviations > 0", got=values)
    return numbers


def _list(fields: Mapping[str, object], name: str, length: int) -> list[object]:
    values = fields.get(name)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise _mismatch(name, expected=f"a list of {length}", got=values)
    return list(values)


def _positive(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or not _is_positive_int(value):
        raise _mismatch(name, expected="a positive integer", got=value)
    return value


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mismatch(name: str, *, expected: object, got: object) -> CheckpointError:
    return CheckpointError(
        f"vae/config.json: {name}: expected {expected!r}, got {got!r}; the checkpoint's VAE must "
        "be of the Wan 2.1 kind"
    )
