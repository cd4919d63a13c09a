"""The transformer against a plain dense oracle, and its window, names, work and dtypes."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.dense_oracle import DenseOracle, visible_history
from tests.helpers.golden import golden_dir, requires_golden
from tests.helpers.kv_window import chronological
from tests.helpers.model_builders import (
    SMALL,
    SMALL_MODEL,
    ModelRollout,
    chunk_inputs,
    small_transformer,
    text_rows,
    transformer_parts,
    weights_of,
    windowed,
)
from vllm_omni.diffusion.attention.backend import create_attention_backend
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.layers.weights import weight_targets
from vllm_omni.diffusion.models.lingbot_world.blocks import TimeEmbedding
from vllm_omni.diffusion.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.diffusion.models.lingbot_world.transformer import (
    CausalLingBotWorldTransformer3DModel,
)
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import ExtentPlan, KVPool, SessionKV

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

REAL_NAMES_SHA256 = "5d31b7f64fd5e5e271b789b2dbe50fb7bbf146bd8b750646bdc9abb4e5b8139d"
REAL_ELEMENTS = 18_544_332_864
REAL_SIZE = VideoGeometry(480, 832)
ROUNDING = {"rtol": 1e-4, "atol": 5e-5}
"""float32 against float64 through two layers and at most 12 frames of keys: about 2e-6 is seen,
the smallest wrong convention moves a flow by 1e-4."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


# --- the arithmetic, up to rounding, against the dense oracle ------------------------------------


@pytest.mark.parametrize(
    ("sink", "window", "sizes"),
    [
        (3, 9, {}),
        (4, 8, {}),
        (5, 12, {}),
        (0, 3, {}),
        (1, 5, {"attention_head_dim": 32}),
        (9, 18, {"num_attention_heads": 3, "attention_head_dim": 20}),
    ],
)
def test_rollout_matches_the_dense_oracle(sink, window, sizes):
    """Probes and commits over the fill of the window and two turns of the ring."""
    config = windowed(sink, window, **sizes)
    rollout = ModelRollout(small_transformer(config))
    oracle = DenseOracle(
        weights_of(config), heads=config.num_attention_heads, sink=sink, window=window
    )
    for chunk in range(2 + (sink + 2 * (window - sink)) // 3):
        inputs, start = chunk_inputs(chunk), 3 * chunk
        around = inputs.camera, text_rows(config)
        expected = oracle.forward(inputs.noisy, 937.5, *around, start=start)
        torch.testing.assert_close(rollout.probe(chunk).double(), expected, **ROUNDING)
        oracle.forward(inputs.clean, 0.0, *around, start=start, commit=True)
        rollout.commit(chunk)


@pytest.mark.parametrize(("sink", "window"), [(3, 9), (4, 8), (5, 12), (0, 3), (7, 10)])
def test_chronological_keys_are_those_the_rule_keeps(sink, window):
    """Exactly the frames of the oracle, in their order; values up to rounding."""
    config = windowed(sink, window)
    rollout = ModelRollout(small_transformer(config))
    oracle = DenseOracle(weights_of(config), heads=2, sink=sink, window=window)
    for chunk in range(6):
        inputs, start = chunk_inputs(chunk), 3 * chunk
        oracle.forward(
            inputs.clean, 0.0, inputs.camera, text_rows(config), start=start, commit=True
        )
        rollout.commit(chunk)
        frames = visible_history(start, frames=3, sink=sink, window=window)
        kept = [*frames, *range(start, start + 3)]
        for layer, committed in enumerate(oracle.committed):
            for part, made in enumerate(chronological(rollout.kv, layer, start + 3)):
                expected = torch.cat([committed[frame][part] for frame in kept])
                torch.testing.assert_close(made.double(), expected, **ROUNDING)


def test_one_timestep_per_frame_is_one_timestep_for_all_when_equal():
    """Bitwise: a row per frame is the same arithmetic."""
    rollout = ModelRollout(small_transformer())
    single = rollout.probe(0, 625.0)
    time = rollout.time(625.0)
    rows = TimeEmbedding(time.head.expand(3, -1), time.blocks.expand(3, -1, -1))
    latents = chunk_inputs(0).noisy
    assert torch.equal(rollout.model(latents, rows, rollout.context(0)), single)


def test_timesteps_differ_by_frame():
    """Frames with a timestep of their own are modulated by it: equal to the oracle's rows."""
    model = small_transformer()
    rows = model.embed_time(torch.tensor([1000.0, 500.0, 0.0]))
    for row, timestep in enumerate((1000.0, 500.0, 0.0)):
        alone = model.embed_time(torch.tensor([timestep]))
        torch.testing.assert_close(rows.blocks[row], alone.blocks[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows.head[row], alone.head[0], rtol=1e-5, atol=1e-6)


def test_rope_past_the_configured_length_follows_the_formula():
    """To one rounding: frames 1023 to 1025 straddle rope_max_seq_len and nothing changes there."""
    model = small_transformer()
    tables = model.rotary_tables(SMALL, 1023, torch.device("cpu"))
    temporal = model.rotary_positions.axis_dims[0]
    tokens = SMALL.tokens_per_frame
    for index, frame in enumerate((1023, 1024, 1025)):
        for pair in range(temporal // 2):
            angle = frame / 10000.0 ** (2 * pair / temporal)
            column = slice(index * tokens, (index + 1) * tokens), pair
            expected = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64).float()
            torch.testing.assert_close(
                tables.cos[column], expected[0].expand(tokens), rtol=0, atol=6e-8
            )
            torch.testing.assert_close(
                tables.sin[column], expected[1].expand(tokens), rtol=0, atol=6e-8
            )


# --- the window: bitwise claims ------------------------------------------------------------------


@pytest.mark.parametrize(("sink", "window"), [(3, 9), (4, 8), (5, 12)])
def test_probes_leave_committed_history_alone(sink, window):
    """Bitwise: probes with any input, and how many, change nothing that a later chunk sees."""
    config = windowed(sink, window)
    quiet, busy = (ModelRollout(small_transformer(config)) for _ in range(2))
    for chunk in range(7):
        for noise in range(1, 4):
            busy.probe(chunk, latents=torch.full((36, 3, 4, 6), 10.0 * noise))
        assert torch.equal(busy.probe(chunk), quiet.probe(chunk))
        quiet.commit(chunk)
        busy.commit(chunk)


@pytest.mark.parametrize("page_tokens", [1, 4, 5, 64])
def test_scattered_pages_equal_an_extent(page_tokens):
    """Bitwise: a gather moves keys and values, it does not compute."""
    extent = ModelRollout(small_transformer(), page_tokens=page_tokens)
    scattered = ModelRollout(small_transformer(), page_tokens=page_tokens, scattered=True)
    assert extent.kv.allocation.is_extent
    assert page_tokens == 64 or not scattered.kv.allocation.is_extent
    for chunk in range(6):
        assert torch.equal(extent.probe(chunk), scattered.probe(chunk))
        extent.commit(chunk)
        scattered.commit(chunk)


def test_a_commit_writes_what_the_full_forward_writes():
    """Bitwise: leaving out the end of the last layer changes no key and no value."""
    cut, full = (ModelRollout(small_transformer()) for _ in range(2))
    for chunk in range(4):
        cut.commit(chunk)
        full.probe(chunk, 0.0, chunk_inputs(chunk).clean)
    for mine, theirs in zip(cut.pool.layers, full.pool.layers, strict=True):
        assert torch.equal(mine.key, theirs.key)
        assert torch.equal(mine.value, theirs.value)


def test_committing_a_chunk_again_replaces_it():
    """Bitwise."""
    once, twice = (ModelRollout(small_transformer()) for _ in range(2))
    for chunk in range(3):
        once.commit(chunk)
        twice.probe(chunk, 0.0, chunk_inputs(chunk + 50).clean)
        twice.commit(chunk)
    assert torch.equal(once.probe(3), twice.probe(3))


def test_reference_backend_agrees_with_sdpa():
    """Up to the order of the softmax sums in float32."""
    plain, fused = (
        ModelRollout(small_transformer(backend=create_attention_backend(name)))
        for name in ("reference", "sdpa")
    )
    for chunk in range(5):
        torch.testing.assert_close(plain.probe(chunk), fused.probe(chunk), rtol=1e-5, atol=1e-5)
        plain.commit(chunk)
        fused.commit(chunk)


def test_bfloat16_stays_near_float32():
    """Lossy: 8 bits of mantissa over two layers; a wrong convention moves it by 0.1 or more."""
    wide, narrow = (
        ModelRollout(small_transformer()),
        ModelRollout(small_transformer(dtype=torch.bfloat16)),
    )
    for chunk in range(4):
        exact, rounded = wide.probe(chunk), narrow.probe(chunk)
        assert rounded.dtype == torch.bfloat16
        error = (rounded.float() - exact).abs()
        assert 0 < error.mean() < 0.02 * exact.std()
        assert error.max() < 0.15 * exact.std()
        wide.commit(chunk)
        narrow.commit(chunk)


# --- the real model, without weights -------------------------------------------------------------


@pytest.fixture(scope="module")
def real_model():
    with torch.device("meta"):
        return CausalLingBotWorldTransformer3DModel(
            transformer_parts(LingBotWorldConfig(), dtype=torch.bfloat16)
        )


def test_real_model_has_exactly_the_published_tensors(real_model):
    targets = weight_targets(real_model)
    joined = "\n".join(sorted(targets))
    assert len(targets) == 1421
    assert hashlib.sha256(joined.encode()).hexdigest() == REAL_NAMES_SHA256
    assert sum(math.prod(target.shape) for target in targets.values()) == REAL_ELEMENTS


@requires_golden
def test_real_model_has_exactly_the_published_shapes(real_model):
    published = json.loads((golden_dir() / "real_14b_names.json").read_text())["transformer"]
    shapes = {name: list(target.shape) for name, target in weight_targets(real_model).items()}
    assert shapes == published["shapes"]


def test_every_parameter_is_filled_by_the_checkpoint(real_model):
    """The targets cover each parameter's elements once."""
    targets = weight_targets(real_model).values()
    filled: dict[int, int] = {}
    for target in targets:
        key = id(target.parameter)
        filled[key] = filled.get(key, 0) + math.prod(target.shape)
    assert filled == {id(p): p.numel() for p in real_model.parameters()}


def real_session(model):
    device = torch.device("meta")
    spec = model.kv_cache_spec(text_tokens=512, page_tokens=128)
    pages = spec.window_pages(REAL_SIZE.tokens_per_frame)
    pool = KVPool(spec, pages, dtype=torch.bfloat16, device=device)
    return spec, pool, SessionKV(pool, REAL_SIZE.tokens_per_frame)


def test_real_window_is_18_frames_without_scratch(real_model):
    spec, pool, kv = real_session(real_model)
    window_tokens = 18 * 1560
    assert spec.window_tokens(REAL_SIZE.tokens_per_frame) == window_tokens
    assert len(kv.allocation.pages) == math.ceil(window_tokens / 128)
    assert (
        pool.pages.num_free == 0
    )  # the extent is the whole pool: a probe needs no room of its own
    assert isinstance(kv.plan(18, 3), ExtentPlan)
    assert window_tokens * spec.token_bytes / 2**30 == pytest.approx(21.4, abs=0.05)
    assert pool.num_bytes - window_tokens * spec.token_bytes < spec.page_bytes


def test_steady_chunk_counts_1142_tflop(real_model):
    """Four equal probes, a commit without the end of its last layer, the camera once; no text."""
    device = torch.device("meta")
    _, _, kv = real_session(real_model)
    size = REAL_SIZE.latent_height, REAL_SIZE.latent_width
    text = real_model.embed_text(torch.empty(512, 4096, dtype=torch.bfloat16, device=device))
    time = real_model.embed_time(torch.empty(1, device=device))
    latents, camera = (
        torch.empty(channels, 3, *size, dtype=torch.bfloat16, device=device)
        for channels in (36, 384)
    )
    with FlopCounterMode(display=False) as once:
        context = real_model.context(camera, text, kv, geometry=REAL_SIZE, start_latent_frame=18)
        real_model.write_window(latents, time, context)
    with FlopCounterMode(display=False) as probe:
        flow = real_model(latents, time, context)
    assert flow.shape == (16, 3, *size)
    flops = once.get_total_flops() + 4 * probe.get_total_flops()
    assert flops / 1e12 == pytest.approx(1142.4, rel=5e-3)


def test_window_size_does_not_change_the_weights():
    assert replace(SMALL_MODEL, sink_size=4).window.ring_frames == 5
    assert set(weight_targets(small_transformer(windowed(4, 8)))) == set(weights_of(SMALL_MODEL))
