"""The counted limits against figures printed elsewhere, and against the real checkpoint's size.

Every comparison with a printed figure allows half a unit of its last printed digit.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.lingbot_world import roofline
from benchmarks.lingbot_world.roofline_counts import (
    VARIANTS,
    Model,
    chunk_exchange,
    chunk_flops,
    chunk_traffic,
    layer_flops,
    parameter_count,
    read_model,
)
from benchmarks.lingbot_world.roofline_devices import (
    DEVICES,
    PRECISIONS,
    chunk_time,
    override_rate,
    wave_fill,
)
from benchmarks.lingbot_world.roofline_vae import Vae, count_decode, count_encode
from tests.helpers.golden import golden_dir, requires_golden

pytestmark = [pytest.mark.core_model, pytest.mark.benchmark, pytest.mark.cpu]

MODEL = Model()
VARIANT = {variant.key: variant for variant in VARIANTS}
DEVICE = {device.name: device for device in DEVICES}
FULL_SIZE = {"height": 480, "width": 832, "latent_frames": 3}


def printed(value: float, *, digits: int = 0):
    """Approximately a figure printed with this many decimals (plus room for float noise)."""
    return pytest.approx(value, rel=0, abs=0.5000001 * 10**-digits)


@pytest.mark.parametrize(
    ("part", "gflop"),
    [
        ("self_attention", 2691.4),
        ("ffn", 1325.0),
        ("qkv", 736.1),
        ("camera", 981.5),
        ("cross_q", 245.4),
        ("out", 245.4),
        ("cross_out", 245.4),
        ("cross_attention", 49.1),
        ("cross_kv", 53.7),
    ],
)
def test_one_layer(part, gflop):
    counted = asdict(layer_flops(MODEL, MODEL.window_tokens))
    assert counted[part] / 1e9 == printed(gflop, digits=1)


@pytest.mark.parametrize(
    ("key", "forwards", "attention", "cross", "gemm", "camera", "total"),
    [
        ("A", 5, 538.3, 9.8, 559.4, 199.1, 1317.7),
        ("B", 5, 538.3, 9.8, 559.4, 199.1, 1306.7),
        ("C", 5, 538.3, 9.8, 559.4, 39.8, 1147.4),
        ("D", 5, 535.6, 9.8, 557.1, 39.8, 1142.4),
        ("E", 4, 430.6, 7.9, 447.5, 39.8, 925.9),
    ],
)
def test_one_chunk(key, forwards, attention, cross, gemm, camera, total):
    flops = chunk_flops(MODEL, VARIANT[key])
    assert VARIANT[key].forwards == forwards
    assert flops.self_attention / 1e12 == printed(attention, digits=1)
    assert flops.cross_attention / 1e12 == printed(cross, digits=1)
    assert flops.gemm / 1e12 == printed(gemm, digits=1)
    assert flops.camera / 1e12 == printed(camera, digits=1)
    # The printed total embeds the timestep once per latent frame: at most 10 rows more.
    extra_rows = 10 * 2 * MODEL.dim * (MODEL.freq_dim + 7 * MODEL.dim) / 1e12
    assert total + 0.05 - flops.total / 1e12 >= 0
    assert flops.total / 1e12 >= total - 0.05 - extra_rows


def test_chunks_while_the_window_fills():
    totals = [
        chunk_flops(MODEL, VARIANT["D"], MODEL.visible_tokens(chunk)).total / 1e12
        for chunk in range(8)
    ]
    assert totals[:6] == [printed(t) for t in (696, 785, 875, 964, 1053, 1142)]
    assert totals[5:] == [totals[5]] * 3


def test_tail_skip_removes_one_layer_but_its_keys_and_values():
    model = replace(MODEL, layers=1)
    full, trimmed = (chunk_flops(model, VARIANT[key]) for key in "CD")
    layer = layer_flops(model, model.window_tokens)
    head = 2 * model.chunk_tokens * model.dim * 64
    left_out = (
        layer.qkv // 3 + layer.out + layer.cross_q + layer.cross_out + layer.ffn
        + layer.self_attention + layer.cross_attention + head
    )  # fmt: skip
    assert full.total - trimmed.total == left_out


def test_parameter_count():
    assert parameter_count(MODEL) == 18_544_332_864


@requires_golden
def test_parameters_of_the_real_checkpoint():
    expected = json.loads((golden_dir() / "real_14b_names.json").read_text())["transformer"]
    assert parameter_count(MODEL) == sum(map(math.prod, expected["shapes"].values()))


@requires_golden
def test_config_of_the_tiny_checkpoint_gives_its_tensors():
    root = golden_dir() / "tiny-lingbot-world" / "transformer"
    model = read_model(root / "config.json", height=64, width=96)
    stored = load_file(root / "diffusion_pytorch_model.safetensors").values()
    assert parameter_count(model) == sum(tensor.numel() for tensor in stored)
    assert (model.frame_tokens, model.window_tokens) == (24, 216)


def test_device_memory_traffic():
    traffic = chunk_traffic(MODEL, 5)
    assert traffic.weights_bytes / 1e9 == printed(120)
    assert traffic.gemm_bytes / 1e9 == printed(286)
    assert traffic.attention_bytes / 1e9 == printed(134)
    assert traffic.elementwise_fused_bytes / 1e9 == printed(220)
    assert traffic.elementwise_eager_bytes / 1e9 == printed(1422)


@pytest.mark.parametrize(
    ("ranks", "qkv", "out", "total"),
    [(2, 7.19, 2.40, 9.59), (4, 5.39, 1.80, 7.19), (8, 3.14, 1.05, 4.20)],
)
def test_exchange_of_five_full_forwards(ranks, qkv, out, total):
    sent = chunk_exchange(MODEL, ranks, VARIANT["C"])
    assert sent.qkv_bytes / 1e9 == printed(qkv, digits=2)
    assert sent.out_bytes / 1e9 == printed(out, digits=2)
    assert sent.total_bytes / 1e9 == printed(total, digits=2)
    assert sent.calls == 605


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layers", [1, 2, 40])
def test_exchange_of_a_trimmed_commit_message_by_message(ranks, layers):
    """Adds up every message of four probes and a commit, in elements sent to other ranks."""
    model = replace(MODEL, layers=layers)
    rows = model.chunk_tokens // ranks
    # Of the heads of its rows, a rank keeps 1 / ranks.
    heads_sent = model.heads // ranks * (ranks - 1)
    part = rows * heads_sent * model.head_dim
    head = rows * 64 * (ranks - 1)
    probe = [2 * part, part, part] * layers + [head]
    commit = [2 * part, part, part] * (layers - 1) + [2 * part]
    messages = probe * 4 + commit
    sent = chunk_exchange(model, ranks, VARIANT["D"])
    assert sent.calls == len(messages) == 4 * (3 * layers + 1) + 3 * layers - 2
    assert sent.total_bytes == 2 * sum(messages)


@pytest.mark.parametrize(
    ("ranks", "window", "camera", "decoder", "encoder"),
    [(1, 21.42, 3.57, 1.76, 1.04), (2, 10.71, 1.79, 0.88, 0.52), (8, 2.68, 0.45, 0.22, 0.13)],
)
def test_resident_memory(ranks, window, camera, decoder, encoder):
    held = roofline.resident(MODEL, Vae(), ranks)
    assert held.weights_bytes / 2**30 == printed(34.54, digits=2)
    assert held.text_encoder_bytes / 2**30 == printed(10.58, digits=2)
    assert held.window_kv_bytes / 2**30 == printed(window, digits=2)
    assert held.cross_kv_bytes / 2**30 == printed(0.39, digits=2)
    assert held.camera_bytes / 2**30 == printed(camera, digits=2)
    assert held.decoder_history_bytes / 2**30 == printed(decoder, digits=2)
    assert held.encoder_history_bytes / 2**30 == printed(encoder, digits=2)


def test_autoencoder_at_full_size():
    decode, first_decode = (count_decode(Vae(), **FULL_SIZE, first=f) for f in (False, True))
    encode = count_encode(Vae(), **FULL_SIZE, first=False)
    assert decode.flops / 1e12 == printed(40.65, digits=2)
    assert first_decode.flops / 1e12 == printed(31.45, digits=2)
    assert encode.flops / 1e12 == printed(24.15, digits=2)
    assert decode.history_elements * 2 / 2**20 == printed(1801)
    assert encode.history_elements * 2 / 2**20 == printed(1069)


def test_autoencoder_against_a_flop_counter():
    """Equality: exact. The oracle runs diffusers' own class on the meta device."""
    vae = Vae(base_dim=8)
    size = {"height": 64, "width": 96}
    with torch.device("meta"):
        oracle = AutoencoderKLWan(base_dim=vae.base_dim, z_dim=vae.z_dim)
        latents = torch.zeros(1, vae.z_dim, 3, 8, 12)
        pixels = torch.zeros(1, 3, 9, 64, 96)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        oracle._decode(latents)
    expected = count_decode(vae, **size, latent_frames=3, first=True)
    # The pass-through of the first latent frame is the only frame of its own call.
    assert counter.get_total_flops() == expected.flops
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        oracle._encode(pixels)
    expected = count_encode(vae, **size, latent_frames=3, first=True)
    assert counter.get_total_flops() == expected.flops


@pytest.mark.parametrize(
    ("device", "ranks", "parts"),
    [
        ("H200", 1, (1155, 786, 862, 57, 0, 1705)),
        ("H200", 2, (578, 414, 434, 29, 34, 911)),
        ("H200", 4, (289, 221, 220, 14, 27, 482)),
        ("H200", 8, (144, 121, 112, 7, 18, 259)),
        ("910B1", 4, (760, 579, 649, 43, 119, 1390)),
        ("910B1", 8, (380, 318, 325, 22, 76, 741)),
        ("910C die", 8, (380, 318, 325, 22, 44, 709)),
        ("RTX 5090", 1, (5453, 3000, 2916, 154, 0, 6070)),
        ("RTX 5090", 4, (1363, 844, 729, 38, 317, 1929)),
        ("L20", 8, (1195, 923, 802, 40, 257, 2022)),
    ],
)
def test_times(device, ranks, parts):
    work = roofline.work_of(MODEL, VARIANT["D"], ranks)
    time = chunk_time(MODEL, DEVICE[device], work, ranks=ranks, precision=PRECISIONS[0])
    nominal, gemm, attention, elementwise, exchange, practical = parts
    assert time.nominal_ms == printed(nominal)
    assert time.gemm_ms == printed(gemm)
    assert time.attention_ms == printed(attention)
    assert time.elementwise_ms == printed(elementwise)
    # The printed exchange has the commit's last layer and head in full: 0.3 % more bytes.
    assert exchange * 0.995 - 0.5 <= time.exchange_ms <= exchange + 0.5
    assert practical - 0.005 * exchange - 0.5 <= time.practical_ms <= practical + 0.5


@pytest.mark.parametrize(
    ("ranks", "gemm8", "both8", "both8_no_commit"),
    [(1, 1362, 1077, 871), (2, 730, 586, 474), (4, 386, 313, 253), (8, 206, 169, 136)],
)
def test_times_in_8_bits(ranks, gemm8, both8, both8_no_commit):
    def practical(key, precision):
        work = roofline.work_of(MODEL, VARIANT[key], ranks)
        return chunk_time(
            MODEL, DEVICE["H200"], work, ranks=ranks, precision=precision
        ).practical_ms

    # 0.17 ms: the printed exchange counts a full commit.
    assert practical("D", PRECISIONS[1]) == pytest.approx(gemm8, abs=0.67)
    assert practical("D", PRECISIONS[2]) == pytest.approx(both8, abs=0.67)
    assert practical("E", PRECISIONS[2]) == printed(both8_no_commit)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, (1705, 1364, 81, 1445, 1786, 957)),
        (2, (911, 729, 40, 769, 951, 544)),
        (4, (482, 386, 20, 406, 503, 312)),
        (8, (259, 207, 10, 217, 269, 189)),
    ],
)
def test_latency(ranks, expected):
    latency = roofline.latency(MODEL, Vae(), DEVICE["H200"], ranks)
    values = (latency.chunk_ms, latency.probes_ms, latency.decode_ms, latency.decode_first_ms,
              latency.commit_first_ms, latency.first_chunk_ms)  # fmt: skip
    assert values == tuple(pytest.approx(value, abs=0.67) for value in expected)


def test_wave_fill():
    fills = [wave_fill(MODEL, ranks=ranks, processors=132) for ranks in (1, 2, 4, 8)]
    assert fills == [printed(value, digits=2) for value in (0.92, 0.92, 0.92, 0.69)]
    split = wave_fill(MODEL, ranks=8, processors=132, kv_splits=2)
    assert split == printed(0.92, digits=2)


def test_other_size():
    larger = Model(height=704, width=1280)
    assert chunk_flops(larger, VARIANT["D"]).total / 1e12 == pytest.approx(4096, abs=1)


def test_override_changes_one_rate():
    (h200, *others) = override_rate(DEVICES, "H200.gemm_p=380")
    assert (h200.gemm_p, h200.attn_p, tuple(others)) == (380, 670, DEVICES[1:])
    named_with_space = override_rate(DEVICES, "910C die.link=75")
    assert named_with_space[2].link == 75


@pytest.mark.parametrize(
    "text",
    [
        "H200.gemm_p",
        "H200.name=3",
        "H300.gemm_p=1",
        "H200.gemm_p=-1",
        "H200.gemm_p=nan",
        "gemm_p=3",
    ],
)
def test_override_refuses(text):
    with pytest.raises(ValueError, match=r"H200|could not convert"):
        override_rate(DEVICES, text)


def test_command_line_prints_tables_and_writes_json(tmp_path: Path, capsys):
    target = tmp_path / "limits.json"
    roofline.main(["--set", "H200.gemm_p=380", "--json", str(target)])
    text = capsys.readouterr().out
    assert "18.544 billion parameters" in text
    assert "696  785  875  964  1053  1142" in text
    written = json.loads(target.read_text())
    one_rank = next(row for row in written["times"] if row["variant"] == "D")
    assert one_rank["time"]["gemm_ms"] == pytest.approx(2 * 785.5, abs=0.2)
    assert written["parameters"] == 18_544_332_864
