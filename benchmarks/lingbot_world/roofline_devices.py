"""Rates of devices, nominal and practical, and the time that counted work takes at them."""

import math
from dataclasses import dataclass, fields, replace

from benchmarks.lingbot_world.roofline_counts import (
    ChunkFlops,
    Exchange,
    Model,
    Traffic,
)
from benchmarks.lingbot_world.roofline_vae import VaeCount, fused_bytes

TERA = 1e12
ATTENTION_TILE = 128
FUSED_BANDWIDTH_SHARE = 0.8
CONV_BANDWIDTH_SHARE = 0.7
ENCODE_OVERHEAD = 1.2
FULL_ROWS = 4680


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of one device; ``*_p`` are the best that real kernels have been seen to reach.

    Attributes:
        bf16: data-sheet dense 16-bit TFLOP/s.
        low: data-sheet dense 8-bit TFLOP/s.
        hbm: memory bandwidth, TB/s.
        gemm_p: 16-bit matrix products of 4680 rows, TFLOP/s.
        attn_p: 16-bit attention with every processor busy, TFLOP/s.
        gemm8_p: 8-bit matrix products, TFLOP/s.
        attn8_p: 8-bit attention, TFLOP/s; 0 where there is none.
        conv_p: 16-bit convolutions, TFLOP/s.
        link: GB/s that one rank sends in an all-to-all.
        call_us: fixed cost of one collective, microseconds.
        processors: if not 0, attention loses the processors that its tiles leave idle.
        ranks: worker group sizes worth printing.
    """

    name: str
    bf16: float
    low: float
    hbm: float
    gemm_p: float
    attn_p: float
    gemm8_p: float
    attn8_p: float
    conv_p: float
    link: float
    call_us: float
    ranks: tuple[int, ...]
    evidence: str
    processors: int = 0

    def fill(self, model: Model, ranks: int) -> float:
        """Share of its rate that attention reaches on one of ``ranks``."""
        if not self.processors:
            return 1.0
        return best_fill(model, ranks=ranks, processors=self.processors)


_NPU_EVIDENCE = "peak from the data sheet; 77 % and 56 % efficiency and the link are assumed"

DEVICES = (
    Device(
        "H200", 989, 1979, 4.8, 760, 670, 1350, 1000, 560, 330, 12,
        ranks=(1, 2, 4, 8), processors=132,
        evidence="matrix products and attention published by others, not measured here",
    ),
    Device(
        "910B1", 376, 752, 1.6, 290, 210, 520, 0, 190, 70, 40,
        ranks=(4, 8), evidence=_NPU_EVIDENCE,
    ),
    Device(
        "910C die", 376, 752, 1.6, 290, 210, 520, 0, 190, 150, 40,
        ranks=(8,), evidence=_NPU_EVIDENCE,
    ),
    Device(
        "RTX 5090", 209.5, 419, 1.792, 199, 187, 393, 524, 176, 26, 100,
        ranks=(1, 2, 4, 8), evidence="practical rates published by others, not measured here",
    ),
    Device(
        "L20", 119.5, 239, 0.864, 100, 85, 190, 150, 90, 18, 60,
        ranks=(1, 4, 8), evidence="efficiencies of 84 %, 71 % and 80 % are assumed",
    ),
)  # fmt: skip


def override_rate(devices: tuple[Device, ...], text: str) -> tuple[Device, ...]:
    """Replace one rate, as in ``"H200.gemm_p=760"``.

    Raises:
        ValueError: the device or rate is unknown, or the value is not a positive number.
    """
    key, _, value = text.partition("=")
    name, _, rate = key.rpartition(".")
    rates = [f.name for f in fields(Device) if f.type in {"float", float, int}]
    names = [device.name for device in devices]
    if name not in names or rate not in rates:
        raise ValueError(
            f"got {text!r}, needed DEVICE.RATE=NUMBER with a device of {', '.join(names)} and a "
            f"rate of {', '.join(rates)}"
        )
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{key} must be a positive number, got {value}")
    typed = int(number) if rate == "processors" else number
    return tuple(
        replace(device, **{rate: typed}) if device.name == name else device for device in devices
    )


def row_efficiency(rows: float) -> float:
    """Share of the matrix-product rate that is left with fewer rows per rank.

    A smooth stand-in for wave quantisation: 1.00, 0.95, 0.89, 0.81 at 4680, 2340, 1170, 585 rows.
    """
    return 1.0 / (1.0 + 0.055 * max(0.0, FULL_ROWS / rows - 1.0) ** 0.75)


def wave_fill(model: Model, *, ranks: int, processors: int, kv_splits: int = 1) -> float:
    """Share of the processors' slots that equal attention tiles keep busy.

    There is a tile per head of the rank, per 128 query rows and per split of the keys.
    """
    row_tiles = math.ceil(model.chunk_tokens / ATTENTION_TILE)
    tiles = model.heads / ranks * row_tiles * kv_splits
    useful_rows = model.chunk_tokens / (ATTENTION_TILE * row_tiles)
    return useful_rows * tiles / (processors * math.ceil(tiles / processors))


def best_fill(model: Model, *, ranks: int, processors: int) -> float:
    """Best fill over 1 to 4 splits of the keys; each further split costs 2 %."""
    return max(
        wave_fill(model, ranks=ranks, processors=processors, kv_splits=splits)
        * (1 - 0.02 * (splits - 1))
        for splits in (1, 2, 3, 4)
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """Which kernels run in 8 bits."""

    label: str
    gemm8: bool = False
    attention8: bool = False


PRECISIONS = (
    Precision("bf16"),
    Precision("8-bit GEMM", gemm8=True),
    Precision("8-bit GEMM and attention", gemm8=True, attention8=True),
)


@dataclass(frozen=True, slots=True)
class Work:
    """Counted work of one chunk of the whole worker group; the exchange is one rank's."""

    flops: ChunkFlops
    traffic: Traffic
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Milliseconds of one chunk's transformer work; nothing overlaps."""

    nominal_ms: float
    gemm_ms: float
    attention_ms: float
    elementwise_ms: float
    exchange_ms: float

    @property
    def practical_ms(self) -> float:
        """Sum of the four practical parts."""
        return self.gemm_ms + self.attention_ms + self.elementwise_ms + self.exchange_ms


def chunk_time(
    model: Model, device: Device, work: Work, *, ranks: int, precision: Precision
) -> ChunkTime:
    """Divide counted work by a device's rates.

    Raises:
        ValueError: the device has no 8-bit attention.
    """
    if precision.attention8 and not device.attn8_p:
        raise ValueError(f"{device.name} has no 8-bit attention rate")
    gemm, attention = work.flops.linear / ranks / TERA, work.flops.attention / ranks / TERA
    nominal_s = gemm / (device.low if precision.gemm8 else device.bf16)
    nominal_s += attention / (device.low if precision.attention8 else device.bf16)
    gemm_rate = device.gemm8_p if precision.gemm8 else device.gemm_p
    attention_rate = device.attn8_p if precision.attention8 else device.attn_p
    attention_rate *= device.fill(model, ranks)
    elementwise = work.traffic.elementwise_fused_bytes / ranks / TERA
    exchange_s = work.exchange.total_bytes / (device.link * 1e9)
    exchange_s += work.exchange.least_calls * device.call_us * 1e-6
    return ChunkTime(
        nominal_ms=1e3 * nominal_s,
        gemm_ms=1e3 * gemm / (gemm_rate * row_efficiency(model.chunk_tokens / ranks)),
        attention_ms=1e3 * attention / attention_rate,
        elementwise_ms=1e3 * elementwise / (device.hbm * FUSED_BANDWIDTH_SHARE),
        exchange_ms=1e3 * exchange_s,
    )


def decode_ms(device: Device, count: VaeCount, *, ranks: int, element_bytes: int) -> float:
    """Fused decode of one chunk, its width shared by the ranks."""
    traffic_s = fused_bytes(count, element_bytes) / TERA / (device.hbm * CONV_BANDWIDTH_SHARE)
    return 1e3 * (count.flops / TERA / device.conv_p + traffic_s) / ranks


def encode_ms(device: Device, count: VaeCount) -> float:
    """Encode of one chunk on one rank."""
    return 1e3 * ENCODE_OVERHEAD * count.flops / TERA / device.conv_p
