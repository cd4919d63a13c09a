"""Turns the counted work of one rank into milliseconds of a steady chunk on an H200.

One queue of the device runs kernels in their order, a second one the messages between ranks. A
message runs beside the kernels between its start and the wait for it, so it costs what they leave.
Rates have been published by others or are assumed: no GPU has run any of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.lingbot_world.kernel_counter import Kernel, Kind
from benchmarks.lingbot_world.roofline_counts import Model
from benchmarks.lingbot_world.roofline_devices import DEVICES, TERA, row_efficiency

ELEMENTWISE_TB_PER_S = 4.0
MESSAGE_START_US = 20.0
"""What a message takes to start and to meet the other ranks, beside the call itself; assumed."""
HALOS_MS = 6.0
"""The decoder's exchanges of border columns among several ranks; assumed."""
HOST_MS = 3.0
"""Of each chunk in which the device is idle; assumed."""
DELIVERY_MS = 36.0
"""Encoding and sending of 12 pixel frames at 832x480, measured on a CPU."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank reaches: TFLOP/s, TB/s, GB/s and the microseconds of each message."""

    product: float
    attention: float
    convolution: float
    elementwise: float
    link: float
    message_us: float


def rates_of(ranks: int) -> Rates:
    """Return the rates of an H200 in a group of ``ranks``, at 832x480."""
    model, device = Model(), DEVICES[0]
    return Rates(
        product=device.gemm_p * row_efficiency(model.chunk_tokens / ranks),
        attention=device.attn_p * device.fill(model, ranks),
        convolution=device.conv_p,
        elementwise=ELEMENTWISE_TB_PER_S,
        link=device.link,
        message_us=device.call_us + MESSAGE_START_US,
    )


@dataclass(frozen=True, slots=True)
class PartTime:
    """Milliseconds of one part of a chunk.

    Attributes:
        kernels: sum over all kernels.
        messages: sum over all messages.
        whole: from the first kernel's start to the last one's end.
    """

    kernels: float
    messages: float
    whole: float

    @property
    def waited(self) -> float:
        """How long kernels wait for messages."""
        return self.whole - self.kernels

    def __add__(self, other: "PartTime") -> "PartTime":
        """Run one part after the other."""
        return PartTime(
            self.kernels + other.kernels, self.messages + other.messages, self.whole + other.whole
        )


def part_time(kernels: Iterable[Kernel], rates: Rates) -> PartTime:
    """Run kernels and messages in their order on two queues."""
    worked = sent = now = sent_until = 0.0
    arrives: dict[str, float] = {}
    for kernel in kernels:
        match kernel.kind:
            case Kind.MESSAGE:
                took = kernel.moved_bytes / rates.link / 1e6 + rates.message_us / 1e3
                sent += took
                sent_until = arrives[kernel.operator] = max(now, sent_until) + took
            case Kind.WAIT:
                now = max(now, arrives[kernel.operator])
            case _:
                took = kernel_ms(kernel, rates)
                worked, now = worked + took, now + took
    return PartTime(worked, sent, now)


def kernel_ms(kernel: Kernel, rates: Rates) -> float:
    """Divide a kernel's work by its rate. Copies from the host run beside everything else."""
    match kernel.kind:
        case Kind.PRODUCT:
            slow = kernel.operator == "convolution"
            return kernel.flops / TERA * 1e3 / (rates.convolution if slow else rates.product)
        case Kind.ATTENTION:
            return kernel.flops / TERA * 1e3 / rates.attention
        case Kind.ELEMENTWISE:
            return kernel.moved_bytes / TERA * 1e3 / rates.elementwise
        case _:
            return 0.0


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """A steady chunk of one rank, with blocks compiled, by its parts."""

    ranks: int
    camera: PartTime
    probes: PartTime
    commit: PartTime
    decode: PartTime
    encode: PartTime

    @property
    def transformer(self) -> PartTime:
        """Camera, four probes and the commit."""
        return self.camera + self.probes + self.commit

    @property
    def pixels(self) -> float:
        """From clean latents to pixels on the host."""
        return self.decode.whole + HOST_MS + (HALOS_MS if self.ranks > 1 else 0.0)

    @property
    def served(self) -> float:
        """Between two chunks of one viewer, once the condition no longer changes."""
        return self.transformer.whole + self.pixels

    @property
    def served_first_ten(self) -> float:
        """Between two of the first ten chunks, each of which makes the condition of the next."""
        return self.served + self.encode.whole

    @property
    def control_to_pixels(self) -> float:
        """From a control to the pixels that follow it at the client; the commit comes later."""
        return self.camera.whole + self.probes.whole + self.pixels + DELIVERY_MS

    def rows(self) -> dict[str, float]:
        """Name the figures, in milliseconds."""
        transformer = self.transformer
        return {
            "transformer, its kernels": transformer.kernels,
            "exchange of tokens": transformer.messages,
            "exchange of tokens, waited for": transformer.waited,
            "decode": self.decode.whole,
            "condition": self.encode.whole,
            "chunk of the transformer": transformer.whole,
            "between two chunks": self.served,
            "between two of the first ten": self.served_first_ten,
            "control to pixels": self.control_to_pixels,
        }


def chunk_times(parts: Mapping[str, Iterable[Kernel]], ranks: int) -> ChunkTimes:
    """Time the parts that ``count_work.py`` counts with blocks compiled."""
    rates = rates_of(ranks)
    names = ("camera", "probes", "commit", "decode", "encode")
    return ChunkTimes(ranks, *(part_time(parts[name], rates) for name in names))
