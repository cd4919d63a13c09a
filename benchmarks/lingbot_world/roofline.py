"""Print the physical limits of one chunk: FLOPs, bytes, exchanges and the time they must take.

    python -m benchmarks.lingbot_world.roofline
    python -m benchmarks.lingbot_world.roofline --config MODEL/transformer/config.json
    python -m benchmarks.lingbot_world.roofline --set H200.gemm_p=760 --json limits.json

Everything is counted, nothing is measured; ``--set`` replaces a rate by a measured one.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lingbot_world.roofline_counts import (
    LATENT_FRAMES,
    TEXT_TOKENS,
    VARIANTS,
    Exchange,
    Model,
    Variant,
    chunk_exchange,
    chunk_flops,
    chunk_traffic,
    layer_flops,
    parameter_count,
    read_model,
    text_kv_flops,
)
from benchmarks.lingbot_world.roofline_devices import (
    DEVICES,
    PRECISIONS,
    TERA,
    ChunkTime,
    Device,
    Precision,
    Work,
    chunk_time,
    decode_ms,
    encode_ms,
    override_rate,
)
from benchmarks.lingbot_world.roofline_vae import (
    Vae,
    VaeCount,
    count_decode,
    count_encode,
    eager_bytes,
    fused_bytes,
    parse_vae,
)

GIGA = 1e9
GIB = 2**30
RANKS = (1, 2, 4, 8)
TRIMMED = VARIANTS[3]
WITHOUT_COMMIT = VARIANTS[4]
TEXT_ENCODER_PARAMETERS = 5_680_910_336
TEXT_ENCODE_MS = 28.0
HOST_MS = 10.0


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that one rank holds."""

    weights_bytes: int
    text_encoder_bytes: int
    window_kv_bytes: int
    cross_kv_bytes: int
    camera_bytes: int
    decoder_history_bytes: int
    encoder_history_bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from a control to its last pixel, and from a request to its first chunk."""

    chunk_ms: float
    probes_ms: float
    decode_ms: float
    decode_first_ms: float
    commit_first_ms: float
    first_chunk_ms: float


def resident(model: Model, vae: Vae, ranks: int) -> Resident:
    """Count what stays in memory: the window, camera and VAE state are shared by ranks."""
    size, stream = model.element_bytes, 2 * model.dim * model.layers * model.element_bytes
    counts = vae_counts(model, vae)
    return Resident(
        weights_bytes=parameter_count(model) * size,
        text_encoder_bytes=TEXT_ENCODER_PARAMETERS * size,
        window_kv_bytes=model.window_tokens * stream // ranks,
        cross_kv_bytes=TEXT_TOKENS * stream,
        camera_bytes=model.chunk_tokens * stream // ranks,
        decoder_history_bytes=counts["decode"].history_elements * size // ranks,
        encoder_history_bytes=counts["encode"].history_elements * size // ranks,
    )


def work_of(model: Model, variant: Variant, ranks: int, visible: int | None = None) -> Work:
    """Counted work of one chunk."""
    return Work(
        flops=chunk_flops(model, variant, visible),
        traffic=chunk_traffic(model, variant.forwards),
        exchange=chunk_exchange(model, ranks, variant),
    )


def latency(model: Model, vae: Vae, device: Device, ranks: int) -> Latency:
    """Compose the practical times; the first chunk is four probes of a three-frame window."""
    bf16, counts = PRECISIONS[0], vae_counts(model, vae)
    steady = chunk_time(
        model, device, work_of(model, TRIMMED, ranks), ranks=ranks, precision=bf16
    ).practical_ms
    first_work = work_of(model, WITHOUT_COMMIT, ranks, model.chunk_tokens)
    first = chunk_time(model, device, first_work, ranks=ranks, precision=bf16).practical_ms
    decode, first_decode = (
        decode_ms(device, counts[name], ranks=ranks, element_bytes=model.element_bytes)
        for name in ("decode", "decode, first chunk")
    )
    encode = encode_ms(device, counts["encode, first chunk"]) / ranks
    text_kv = 1e3 * text_kv_flops(model) / TERA / device.gemm_p
    probes = steady * 4 / 5
    return Latency(
        chunk_ms=steady,
        probes_ms=probes,
        decode_ms=decode,
        decode_first_ms=probes + decode,
        commit_first_ms=steady + decode,
        first_chunk_ms=TEXT_ENCODE_MS + encode + text_kv + first + first_decode + HOST_MS,
    )


@dataclass(frozen=True, slots=True)
class TimeRow:
    """One line of the table of times."""

    device: str
    ranks: int
    precision: str
    variant: str
    time: ChunkTime


def time_rows(model: Model, devices: tuple[Device, ...]) -> Iterator[TimeRow]:
    """Times of every device, group size, precision, with the commit and without."""
    cases = [(TRIMMED, precision) for precision in PRECISIONS]
    cases += [(WITHOUT_COMMIT, PRECISIONS[0]), (WITHOUT_COMMIT, PRECISIONS[-1])]
    groups = [(device, ranks) for device in devices for ranks in device.ranks]
    for (device, ranks), (variant, precision) in itertools.product(groups, cases):
        if _can_run(model, device, ranks, precision):
            work = work_of(model, variant, ranks)
            time = chunk_time(model, device, work, ranks=ranks, precision=precision)
            yield TimeRow(device.name, ranks, precision.label, variant.key, time)


def _can_run(model: Model, device: Device, ranks: int, precision: Precision) -> bool:
    splits = model.heads % ranks == 0 and model.frame_tokens % ranks == 0
    return splits and (device.attn8_p > 0 or not precision.attention8)


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Right-aligned text table; the first column is left-aligned."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in lines)])


def flops_tables(model: Model) -> Iterator[str]:
    """One layer, one chunk in every variant, and chunks while the window fills."""
    layer = asdict(layer_flops(model, model.window_tokens))
    rows = [[name, f"{value / GIGA:.1f}"] for name, value in layer.items()]
    yield table("One layer, one forward", ["part", "GFLOP"], rows)
    counted = [(variant, chunk_flops(model, variant)) for variant in VARIANTS]
    base = counted[0][1].total
    yield table(
        "One chunk, window full (TFLOP)",
        ["variant", "forwards", "self", "cross", "gemm", "camera", "text", "total", "vs A"],
        [
            [f"{variant.key} {variant.label}", str(variant.forwards)]
            + [
                f"{value / TERA:.1f}"
                for value in (
                    flops.self_attention, flops.cross_attention, flops.gemm, flops.camera,
                    flops.cross_kv, flops.total,
                )
            ]
            + [f"{100 * (flops.total / base - 1):+.1f} %"]
            for variant, flops in counted
        ],
    )  # fmt: skip
    chunks = range(-(-model.window_latent_frames // LATENT_FRAMES))
    growth = [chunk_flops(model, TRIMMED, model.visible_tokens(chunk)).total for chunk in chunks]
    yield table(
        "Chunks while the window fills (variant D, TFLOP)",
        [str(chunk) for chunk in chunks],
        [[f"{total / TERA:.0f}" for total in growth]],
    )


def bytes_tables(model: Model, vae: Vae) -> Iterator[str]:
    """Memory traffic, resident memory and exchanges."""
    traffic = asdict(chunk_traffic(model, TRIMMED.forwards))
    rows = [[name.removesuffix("_bytes"), f"{value / GIGA:.1f}"] for name, value in traffic.items()]
    yield table("Device memory traffic of one chunk", ["part", "GB"], rows)
    held = {ranks: asdict(resident(model, vae, ranks)) for ranks in RANKS}
    yield table(
        "Resident on one rank of a worker group (GiB)",
        ["part", *(f"of {ranks}" for ranks in RANKS)],
        [
            [name.removesuffix("_bytes"), *(f"{held[ranks][name] / GIB:.2f}" for ranks in RANKS)]
            for name in held[1]
        ],
    )
    yield table(
        "Ulysses exchange of one chunk, sent by one rank (variant D)",
        ["ranks", "q|k|v GB", "output GB", "total GB", "calls"],
        [_exchange_row(ranks, chunk_exchange(model, ranks, TRIMMED)) for ranks in RANKS[1:]],
    )


def _exchange_row(ranks: int, sent: Exchange) -> list[str]:
    parts = (sent.qkv_bytes, sent.out_bytes, sent.total_bytes)
    return [str(ranks), *(f"{value / GIGA:.2f}" for value in parts), str(sent.calls)]


def vae_counts(model: Model, vae: Vae) -> dict[str, VaeCount]:
    """Decode and encode of the first and of a later chunk."""
    sides = {"height": model.height, "width": model.width, "latent_frames": LATENT_FRAMES}
    return {
        "decode, first chunk": count_decode(vae, **sides, first=True),
        "decode": count_decode(vae, **sides, first=False),
        "encode, first chunk": count_encode(vae, **sides, first=True),
        "encode": count_encode(vae, **sides, first=False),
    }


def vae_table(model: Model, vae: Vae) -> str:
    """Work, traffic and history of the autoencoder."""
    return table(
        "Video autoencoder, one chunk",
        ["direction", "TFLOP", "fused GB", "op by op GB", "history MiB"],
        [
            [
                name,
                f"{count.flops / TERA:.2f}",
                f"{fused_bytes(count, model.element_bytes) / GIGA:.0f}",
                f"{eager_bytes(count, model.element_bytes) / GIGA:.0f}",
                f"{count.history_elements * model.element_bytes / 2**20:.0f}",
            ]
            for name, count in vae_counts(model, vae).items()
        ],
    )


def times_tables(model: Model, vae: Vae, devices: tuple[Device, ...]) -> Iterator[str]:
    """Times per device and, for the first device, the latencies they add up to."""
    yield table(
        "Transformer time of one chunk (ms): data-sheet rates, then practical rates, no overlap",
        ["device, ranks, precision, variant", "nominal", "gemm", "attention", "elementwise",
         "exchange", "practical"],
        [
            [f"{row.device} x{row.ranks} {row.precision}, {row.variant}"]
            + [f"{value:.0f}" for value in (*asdict(row.time).values(), row.time.practical_ms)]
            for row in time_rows(model, devices)
        ],
    )  # fmt: skip
    first = devices[0]
    usable = [ranks for ranks in first.ranks if _can_run(model, first, ranks, PRECISIONS[0])]
    yield table(
        f"Latency on {first.name} (ms, bf16)",
        ["ranks", "chunk", "probes", "decode", "decode first", "commit first", "first chunk"],
        [
            [str(ranks)]
            + [f"{value:.0f}" for value in asdict(latency(model, vae, first, ranks)).values()]
            for ranks in usable
        ],
    )


def as_json(model: Model, vae: Vae, devices: tuple[Device, ...]) -> dict:
    """Every count and time, keyed like the tables."""
    return {
        "model": asdict(model),
        "parameters": parameter_count(model),
        "chunk_flops": {
            variant.key: {**asdict(flops), "total": flops.total}
            for variant in VARIANTS
            for flops in [chunk_flops(model, variant)]
        },
        "traffic": asdict(chunk_traffic(model, TRIMMED.forwards)),
        "resident": {ranks: asdict(resident(model, vae, ranks)) for ranks in RANKS},
        "exchange": {ranks: asdict(chunk_exchange(model, ranks, TRIMMED)) for ranks in RANKS},
        "vae": {name: asdict(count) for name, count in vae_counts(model, vae).items()},
        "devices": [asdict(device) for device in devices],
        "times": [
            {**asdict(row), "practical_ms": row.time.practical_ms}
            for row in time_rows(model, devices)
        ],
    }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="transformer/config.json (default: 14B)")
    parser.add_argument("--vae-config", type=Path, help="vae/config.json (default: released)")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--set", action="append", default=[], metavar="DEVICE.RATE=NUMBER",
                        dest="overrides", help="replace a rate, e.g. H200.gemm_p=760")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print all tables."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    model = read_model(options.config, height=options.height, width=options.width)
    vae = parse_vae(json.loads(options.vae_config.read_text())) if options.vae_config else Vae()
    devices = DEVICES
    for text in options.overrides:
        devices = override_rate(devices, text)
    print(
        f"{model.width}x{model.height}: {model.frame_tokens} tokens per latent frame, "
        f"{model.chunk_tokens} queries, {model.window_tokens} keys; {model.layers} layers of "
        f"{model.dim}; {parameter_count(model) / GIGA:.3f} billion parameters"
    )
    for text in flops_tables(model):
        print(f"\n{text}")
    for text in bytes_tables(model, vae):
        print(f"\n{text}")
    print(f"\n{vae_table(model, vae)}")
    for text in times_tables(model, vae, devices):
        print(f"\n{text}")
    if options.json:
        options.json.write_text(json.dumps(as_json(model, vae, devices), indent=1) + "\n")


if __name__ == "__main__":
    main()
