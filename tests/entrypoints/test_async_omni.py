"""The asynchronous Python API on the tiny model: streams, clips, steering, early ends."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.local_server import CPU_TINY
from tests.helpers.socket_client import picture_url
from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni import AsyncOmni
from vllm_omni.engine.session import ChunkReady, Ended, SessionEvent, WasReset
from vllm_omni.errors import ConfigError, InvalidRequestError, SessionClosedError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

PROMPT = {"prompt": "a harbour", "multi_modal_data": {"image": picture_url()}}
FORWARD = {
    "event": {
        "multi_modal_data": {"camera": {"mode": "velocity", "data": {"translation": [0, 0, 0.05]}}}
    }
}


def params(**changes: object) -> OmniDiffusionSamplingParams:
    """Two live chunks at 64x96."""
    fields = {"height": 64, "width": 96, "num_frames": 21, "seed": 7, "fps": 16}
    return OmniDiffusionSamplingParams(**(fields | changes))


@pytest.fixture(scope="module")
def streaming():
    made = AsyncOmni(
        str(tiny_checkpoint_dir()), deploy_config=str(CPU_TINY),
        distributed_executor_backend="inline", max_num_seqs=2,
    )  # fmt: skip
    yield made
    made.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def clips():
    made = AsyncOmni(str(tiny_checkpoint_dir()), device="cpu", dtype="float32")
    yield made
    made.shutdown()


async def chunks_of(omni: AsyncOmni, **changes: object) -> list[np.ndarray]:
    return [output.images[0] async for output in omni.generate(PROMPT, params(**changes))]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def aborted(omni: AsyncOmni) -> float:
    registry = omni.client.engine.metrics.registry
    labels = {"model_name": str(tiny_checkpoint_dir()), "reason": "client_abort"}
    return registry.get_sample_value("vllm_omni:requests_failed_total", labels) or 0.0


async def wait_idle(omni: AsyncOmni) -> None:
    async with asyncio.timeout(20):
        while omni.client.engine.num_sessions:
            await asyncio.sleep(0.01)


async def test_a_stream_has_one_output_per_chunk(streaming):
    outputs = [output async for output in streaming.generate(PROMPT, params(), "mine")]
    assert [output.images[0].shape for output in outputs] == [(9, 64, 96, 3), (12, 64, 96, 3)]
    assert {output.images[0].dtype for output in outputs} == {np.dtype(np.uint8)}
    assert [output.finished for output in outputs] == [False, True]
    assert {output.request_id for output in outputs} == {"mine"}
    stream = [output.multimodal_output["metadata"]["stream"] for output in outputs]
    assert [entry["generation_chunk_index"] for entry in stream] == [0, 1]


async def test_a_clip_is_the_stream_in_one_piece(streaming, clips):
    script = {"camera_action_script": [[["w"]] * 3, [["l"], [], ["s"]]]}
    (clip,) = [o async for o in clips.generate(PROMPT, params(extra_args=script))]
    chunks = await chunks_of(streaming, extra_args=script)
    assert clip.finished
    assert clip.images[0].shape == (21, 64, 96, 3)
    assert clip.images[0].dtype == np.float32
    # Equal up to the rounding to bytes.
    difference = np.abs(clip.images[0] * 255.0 - np.concatenate(chunks))
    assert difference.max() <= 1.0


async def test_the_same_seed_gives_the_same_world_and_another_another(streaming):
    first, again, other = [await chunks_of(streaming, seed=seed) for seed in (1, 1, 2)]
    # Bitwise.
    assert same(first, again)
    assert not same(first, other)


async def test_two_at_once_are_each_as_if_alone(streaming):
    alone = [await chunks_of(streaming, seed=seed) for seed in (1, 2)]
    together = await asyncio.gather(*(chunks_of(streaming, seed=seed) for seed in (1, 2)))
    # Bitwise.
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))


async def test_a_reset_world_is_a_fresh_one(streaming):
    expected = await chunks_of(streaming, num_frames=33)
    engine = streaming.client.engine
    request = await asyncio.to_thread(streaming.request, PROMPT, params(seed=99))
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def sink(event: SessionEvent) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    session_id = engine.open(replace(request, num_chunks=None), sink)
    made: list[np.ndarray] = []
    resets = 0
    while len(made) < 3 or not resets:
        event = await events.get()
        if isinstance(event, WasReset):
            resets, made = resets + 1, []
        if isinstance(event, ChunkReady):
            made.append(event.result.data)
            engine.delivered(session_id)
            if not resets and len(made) == 2:
                engine.reset(session_id, lambda before: replace(before, seed=7))
    engine.stop(session_id)
    while not isinstance(await events.get(), Ended):
        pass
    # Bitwise.
    assert same(made[:3], expected)


async def test_a_request_can_be_steered(streaming):
    still = await chunks_of(streaming, num_frames=45)
    moved, receipts = [], []
    async for output in streaming.generate(PROMPT, params(num_frames=45), "steered"):
        moved.append(output.images[0])
        receipts.append(output.multimodal_output["metadata"]["stream"]["started_event_ids"])
        if len(moved) == 1:
            event_id = await streaming.submit_interaction_async("steered", FORWARD)
    applied = next(index for index, ids in enumerate(receipts) if event_id in ids)
    assert applied in {1, 2, 3}
    assert same(moved[:applied], still[:applied])
    assert not np.array_equal(moved[applied], still[applied])


async def test_interactions_are_checked(streaming):
    with pytest.raises(SessionClosedError, match="nobody"):
        await streaming.submit_interaction_async("nobody", FORWARD)
    outputs = streaming.generate(PROMPT, params(), "checked")
    await anext(outputs)
    with pytest.raises(InvalidRequestError):
        await streaming.submit_interaction_async("checked", {"event": {}})
    await outputs.aclose()


async def test_abort_ends_without_an_error(streaming):
    before = aborted(streaming)
    outputs = []
    async for output in streaming.generate(PROMPT, params(num_frames=117), "aborted"):
        outputs.append(output)
        await streaming.abort("aborted")
    assert 1 <= len(outputs) < 10
    await streaming.abort("aborted")
    await wait_idle(streaming)
    assert aborted(streaming) == before + 1


async def test_leaving_early_frees_the_session(streaming):
    outputs = streaming.generate(PROMPT, params(num_frames=117), "left")
    await anext(outputs)
    await outputs.aclose()
    await wait_idle(streaming)
    assert len(await chunks_of(streaming)) == 2


async def test_a_running_id_is_taken(streaming):
    outputs = streaming.generate(PROMPT, params(), "taken")
    await anext(outputs)
    with pytest.raises(InvalidRequestError, match="'taken' is running"):
        await anext(streaming.generate(PROMPT, params(), "taken"))
    await outputs.aclose()
    await wait_idle(streaming)


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ("a harbour", {}, "prompt"),
        ({"prompt": " ", "multi_modal_data": PROMPT["multi_modal_data"]}, {}, "prompt"),
        ({"prompt": "x"}, {}, "image"),
        (PROMPT, {"num_frames": 20}, "num_frames"),
        (PROMPT, {"num_inference_steps": 5}, "num_inference_steps"),
        (PROMPT, {"height": 65}, "height"),
    ],
)
async def test_bad_requests_are_refused_before_any_work(streaming, prompt, changes, words):
    await wait_idle(streaming)
    with pytest.raises(InvalidRequestError, match=words):
        await anext(streaming.generate(prompt, params(**changes)))
    assert streaming.client.engine.num_sessions == 0


async def test_one_stage_takes_one_set_of_parameters(streaming):
    listed = streaming.generate(PROMPT, sampling_params_list=[params()])
    assert len([output async for output in listed]) == 2
    with pytest.raises(InvalidRequestError, match="one stage"):
        await anext(streaming.generate(PROMPT, sampling_params_list=[params()] * 2))


async def test_a_clip_needs_a_camera(clips):
    with pytest.raises(InvalidRequestError, match="camera"):
        await anext(clips.generate(PROMPT, params()))


def test_unknown_settings_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="colour"):
        AsyncOmni(str(tiny_checkpoint_dir()), colour="red")
    assert sum(thread.name == "engine" for thread in threading.enumerate()) <= 2
