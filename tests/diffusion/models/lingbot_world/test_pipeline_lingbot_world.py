"""Whole rollouts on the tiny checkpoint: sessions, cameras, prompts, outputs."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.mark import advanced
from tests.helpers.model_builders import (
    SMALL,
    keys_request,
    small_config,
    tiny_worker,
)
from tests.helpers.sessions import make_rollout
from tests.helpers.tiny import tiny_prompt
from vllm_omni.diffusion.data import KVCacheConfig
from vllm_omni.diffusion.geometry import VideoGeometry, chunk_pixel_frames
from vllm_omni.diffusion.messages import (
    ChunkPlan,
    LiveCamera,
    OutputKind,
    PromptStep,
    RecordedCamera,
    SessionRequest,
)
from vllm_omni.diffusion.models.lingbot_world.attention import TextKV
from vllm_omni.diffusion.models.lingbot_world.blocks import CameraModulation
from vllm_omni.diffusion.models.lingbot_world.vae.state import CoderHistory
from vllm_omni.diffusion.worker.worker import Worker
from vllm_omni.errors import (
    CheckpointError,
    InternalError,
    InvalidRequestError,
    SessionClosedError,
)

pytest_plugins = ["tests.helpers.fixtures.workers"]
pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

CHUNKS = 5
"""The tiny model's window is full after three."""


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(x, y) for x, y in zip(first, second, strict=True)
    )


# --- sessions are alone -------------------------------------------------------------------------


@pytest.mark.parametrize("output", [advanced(OutputKind.LATENT), OutputKind.UINT8])
def test_interleaved_sessions_equal_each_alone(worker, output):
    """Bitwise, latents and pixels: A0 B0 A1 B1 ... is A0 A1 ... and B0 B1 ..."""
    requests = {"a": keys_request(CHUNKS, seed=1, output=output, prompt="a jungle"),
                "b": keys_request(CHUNKS, seed=2, output=output, prompt="a castle")}  # fmt: skip
    alone = {name: make_rollout(worker, request) for name, request in requests.items()}
    assert not same(alone["a"], alone["b"])
    together: dict[str, list[np.ndarray]] = {"a": [], "b": []}
    for name, request in requests.items():
        worker.open_session(name, request)
    for chunk in range(CHUNKS):
        for name, made in together.items():
            worker.run_chunk(
                ChunkPlan(name, chunk), lambda result, made=made: made.append(result.data)
            )
    assert all(same(together[name], alone[name]) for name in alone)


def test_a_session_between_the_chunks_of_another(worker):
    """Bitwise, with other pages, another size and another prompt in between."""
    request = keys_request(3)
    alone, made = make_rollout(worker, request), []
    worker.open_session("a", request)
    for chunk in range(3):
        worker.run_chunk(ChunkPlan("a", chunk), lambda result: made.append(result.data))
        other = keys_request(1, seed=9, geometry=VideoGeometry(16, 64), prompt="x")
        make_rollout(worker, other, session_id="b")
    assert same(made, alone)


def test_the_same_request_gives_the_same_video(worker):
    """Bitwise; another seed, prompt, picture or camera gives another."""
    request = keys_request(2)
    first = make_rollout(worker, request)
    assert same(first, make_rollout(worker, request))
    others = [
        replace(request, seed=43),
        replace(request, prompt=tiny_prompt("another")),
        replace(request, image=keys_request(1, seed=5).image),
        replace(request, camera=keys_request(2, seed=41).camera),
        replace(request, flow_shift=3.0),
    ]
    assert not any(same(first, make_rollout(worker, other)) for other in others)


def test_the_length_asked_for_changes_no_chunk(worker):
    """Bitwise for scripted keys: a rollout of two chunks is the beginning of one of four."""
    long = keys_request(4)
    assert same(make_rollout(worker, keys_request(2)), make_rollout(worker, long)[:2])


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [SMALL, VideoGeometry(16, 16), VideoGeometry(48, 32)])
def test_shapes_and_types_of_the_outputs(worker, geometry):
    sizes = {kind: keys_request(2, output=kind, geometry=geometry) for kind in OutputKind}
    made = {kind: make_rollout(worker, request) for kind, request in sizes.items()}
    for chunk in range(2):
        pixels = (chunk_pixel_frames(chunk), geometry.height, geometry.width, 3)
        assert made[OutputKind.UINT8][chunk].shape == pixels
        assert made[OutputKind.UINT8][chunk].dtype == np.uint8
        assert made[OutputKind.FLOAT][chunk].shape == pixels
        assert made[OutputKind.FLOAT][chunk].dtype == np.float32
        latents = (1, 16, 3, geometry.latent_height, geometry.latent_width)
        assert made[OutputKind.LATENT][chunk].shape == latents
        assert made[OutputKind.LATENT][chunk].dtype == np.float32


def test_bytes_are_the_floats_rounded(worker):
    """Exact: both come from the same pixels, halves to even."""
    made = {
        kind: make_rollout(worker, keys_request(2, output=kind))
        for kind in (OutputKind.UINT8, OutputKind.FLOAT)
    }
    for uint8, floats in zip(*made.values(), strict=True):
        assert floats.min() >= 0
        assert floats.max() <= 1
        assert np.array_equal(uint8, np.round(floats * np.float32(255)).astype(np.uint8))


# --- cameras and prompts ------------------------------------------------------------------------


def live_request(num_chunks: int) -> SessionRequest:
    return replace(keys_request(num_chunks), camera=LiveCamera())


def run_live(worker: Worker, plans: list[ChunkPlan]) -> list[np.ndarray]:
    made: list[np.ndarray] = []
    worker.open_session("live", live_request(len(plans)))
    for plan in plans:
        worker.run_chunk(plan, lambda result: made.append(result.data))
    worker.close_session("live")
    return made


def still(chunk: int, **fields: object) -> ChunkPlan:
    return ChunkPlan("live", chunk, poses=np.tile(np.eye(4), (3, 1, 1)), **fields)


def test_a_recorded_path_depends_on_its_whole_clip(worker):
    """The scale is the longest step of the clip: a later, longer step changes the first chunk."""
    poses = np.tile(np.eye(4, dtype=np.float32), (21, 1, 1))
    poses[:, 2, 3] = np.arange(21) * 0.1
    far = poses.copy()
    far[-1, 2, 3] += 5
    intrinsics = np.tile(np.array([500, 500, 416, 240], np.float32), (21, 1))
    near, stretched = (
        make_rollout(worker, replace(keys_request(2), camera=RecordedCamera(path, intrinsics)))
        for path in (poses, far)
    )
    assert not np.array_equal(near[0], stretched[0])


def test_a_prompt_step_of_one_is_a_session_with_that_prompt(worker):
    """Bitwise: switched before chunk 0, nothing of the first prompt is left."""
    plans = [still(0, prompt=PromptStep(tiny_prompt("another world"), 1.0)), still(1)]
    switched = run_live(worker, plans)
    made: list[np.ndarray] = []
    worker.open_session("live", replace(live_request(2), prompt=tiny_prompt("another world")))
    for plan in (still(0), still(1)):
        worker.run_chunk(plan, lambda result: made.append(result.data))
    assert same(switched, made)


def test_a_prompt_changes_from_its_chunk_on(worker):
    """Bitwise before, different after; a blend is neither of its ends."""
    plain = run_live(worker, [still(0), still(1), still(2)])
    whole, half = (
        run_live(
            worker,
            [still(0), still(1, prompt=PromptStep(tiny_prompt("another world"), w)), still(2)],
        )
        for w in (1.0, 0.5)
    )
    assert np.array_equal(plain[0], whole[0])
    for first, second in ((plain, whole), (plain, half), (whole, half)):
        assert not np.array_equal(first[1], second[1])


def test_a_plan_out_of_order_ends_the_session(worker):
    worker.open_session("live", live_request(3))
    with pytest.raises(InternalError, match="stands before chunk 0, got chunk 1"):
        worker.run_chunk(still(1), lambda _: None)
    with pytest.raises(SessionClosedError):
        worker.run_chunk(still(0), lambda _: None)


# --- committed state ----------------------------------------------------------------------------


def test_denoising_changes_no_committed_state(worker):
    """Only the commit moves a session on: the same chunk can be denoised twice."""
    pipeline = worker.pipeline
    session = pipeline.open_session("s", keys_request(3))
    try:
        for chunk in range(3):
            before = session.committed
            noise = session.setup.generator.get_state()
            first, _ = pipeline.denoise_chunk(session, ChunkPlan("s", chunk))
            first = first.clone()
            assert session.committed is before
            session.setup.generator.set_state(noise)
            again, _ = pipeline.denoise_chunk(session, ChunkPlan("s", chunk))
            assert torch.equal(first, again)  # bitwise, after its own probes wrote the window
            pipeline.commit_chunk(session)
            assert session.committed.next_chunk == chunk + 1
    finally:
        session.close()


def test_who_gets_latents_may_write_to_them(worker):
    """Bitwise: the commit, which comes later, does not see what happens to a chunk's array."""
    request, made = keys_request(2, output=OutputKind.LATENT), []

    def deliver(result):
        made.append(result.data.copy())
        result.data.fill(0.0)

    worker.open_session("s", request)
    for chunk in range(2):
        worker.run_chunk(ChunkPlan("s", chunk), deliver)
    worker.close_session("s")
    assert same(made, make_rollout(worker, request))


def test_a_closed_session_refuses_everything(worker):
    session = worker.pipeline.open_session("s", keys_request(1))
    session.close()
    session.close()
    for use in (lambda: session.kv, lambda: session.committed, lambda: session.pending):
        with pytest.raises(SessionClosedError):
            use()


def test_reusing_the_last_probe_changes_later_chunks_only():
    """Lossy by choice: chunk 0 is bitwise the same, later ones see noisier keys."""
    usual = make_rollout(tiny_worker(), keys_request(3, output=OutputKind.LATENT))
    worker = Worker(small_config(reuse_last_step_kv=True))
    reused = make_rollout(worker, keys_request(3, output=OutputKind.LATENT))
    assert np.array_equal(usual[0], reused[0])
    for chunk in (1, 2):
        assert 0 < np.abs(usual[chunk] - reused[chunk]).max() < 1.0


def test_bfloat16_follows_float32():
    """Lossy: the same world within the rounding of 8 bits, over one chunk."""
    exact = make_rollout(tiny_worker(), keys_request(1, output=OutputKind.LATENT))[0]
    rounded = make_rollout(
        Worker(small_config(dtype="bfloat16")), keys_request(1, output=OutputKind.LATENT)
    )[0]
    assert rounded.dtype == np.float32
    error = np.abs(rounded - exact)
    assert 0 < error.mean() < 0.03 * exact.std()


# --- settings -----------------------------------------------------------------------------------


def test_the_deploy_window_replaces_the_checkpoints():
    worker = Worker(small_config(kv_cache=KVCacheConfig(window_chunks=5, sink_chunks=4)))
    spec = worker.pipeline.kv_cache_spec()
    assert (spec.window_frames, spec.sink_frames) == (9, 4)
    usual = make_rollout(tiny_worker(), keys_request(4))
    other = make_rollout(worker, keys_request(4))
    assert same(usual[:3], other[:3])  # bitwise while nothing has left either window
    assert not np.array_equal(usual[3], other[3])


@pytest.mark.parametrize(
    "page_tokens",
    [advanced(1), 7, advanced(128)],
)
def test_page_size_changes_no_bit(page_tokens):
    """Bitwise."""
    worker = Worker(small_config(kv_cache=KVCacheConfig(page_tokens=page_tokens)))
    assert same(make_rollout(worker, keys_request(4)), make_rollout(tiny_worker(), keys_request(4)))


def test_state_bytes_bound_what_a_session_holds(worker):
    """Text KV, decoder and encoder history: no tensor of a session is left out."""
    session = worker.pipeline.open_session("s", keys_request(4))
    try:
        for chunk in range(4):
            worker.pipeline.denoise_chunk(session, ChunkPlan("s", chunk))
            worker.pipeline.commit_chunk(session)
            committed = session.committed
            held = committed.condition.bytes() + committed.decoder.bytes()
            assert committed.text is not None
            held += sum(pair.key.nbytes + pair.value.nbytes for pair in committed.text.kv)
            assert held <= worker.pipeline.state_bytes(SMALL)
    finally:
        session.close()


def held_storages() -> dict[int, int]:
    """Address and bytes of every tensor in a VAE history, a prompt or a camera that is alive."""
    tensors: list[torch.Tensor] = []
    for thing in gc.get_objects():
        if type(thing) is CoderHistory:  # isinstance would ask the class of every object there is
            tensors += thing.tensors()
        elif type(thing) is TextKV:
            tensors += (thing.key, thing.value)
        elif type(thing) is CameraModulation:
            tensors += (thing.gain, thing.shift)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_state_and_workspace_bytes_bound_what_is_alive_while_a_chunk_is_made(worker, monkeypatch):
    """Measured at the end of every latent frame of encoder and decoder, with a new prompt."""
    pipeline, before, peaks = worker.pipeline, held_storages(), []

    def measured(forward):
        def call(*args, **kwargs):
            result = forward(*args, **kwargs)
            alive = held_storages()
            peaks.append(sum(size for place, size in alive.items() if place not in before))
            return result

        return call

    for coder in (pipeline.model.vae.encoder, pipeline.model.vae.decoder):
        monkeypatch.setattr(coder, "forward", measured(coder.forward))
    session = pipeline.open_session("s", keys_request(2))
    for chunk in range(2):
        prompt = PromptStep(tiny_prompt("another world"), 0.5) if chunk == 1 else None
        pipeline.denoise_chunk(session, ChunkPlan("s", chunk, prompt=prompt))
        pipeline.commit_chunk(session)
    session.close()
    planned = pipeline.state_bytes(SMALL) + pipeline.workspace_bytes(SMALL)
    # Some histories hold a frame less than counted, and no other part is free to differ.
    assert 0.95 * planned < max(peaks) <= planned


def test_noise_of_a_device_that_is_not_there_is_refused_by_name(worker):
    """The window that was taken before is given back."""
    request, free = replace(keys_request(1), generator_device="npu"), worker.pool.pages.num_free
    with pytest.raises(InvalidRequestError, match="generator_device: must be cpu here, got npu"):
        worker.open_session("s", request)
    assert worker.pool.pages.num_free == free


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"model_index\.json: cannot be read \(No such file"):
        Worker(replace(small_config(), model=str(tmp_path)))
