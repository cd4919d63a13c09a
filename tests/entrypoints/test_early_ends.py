"""Ids of the Python API, and ends that come early: twins, a closed event loop, an interrupt."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers.tiny import tiny_checkpoint_dir
from vllm_omni import AsyncOmni, Omni
from vllm_omni.errors import InvalidRequestError, SessionClosedError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PROMPT = {
    "prompt": "a desert",
    "multi_modal_data": {"image": np.full((64, 96, 3), 90, np.uint8)},
}


def params(num_frames: int = 21) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(
        height=64, width=96, num_frames=num_frames, seed=3, output_type="pil"
    )


@pytest.fixture(scope="module")
def omni() -> Iterator[AsyncOmni]:
    made = AsyncOmni(str(tiny_checkpoint_dir()), streaming_output=True)
    yield made
    made.shutdown()


async def collect(omni: AsyncOmni, request_id: str) -> list[OmniRequestOutput]:
    return [output async for output in omni.generate(PROMPT, params(), request_id)]


async def test_a_stream_carries_the_callers_id_outside_and_inside(omni: AsyncOmni):
    outputs = await collect(omni, "mine")
    assert [output.request_id for output in outputs] == ["mine", "mine"]
    assert [output.finished for output in outputs] == [False, True]
    inner = [output.multimodal_output["metadata"]["ar_diffusion"] for output in outputs]
    assert [ids["chunk_index"] for ids in inner] == [0, 1]
    assert inner[0]["request_id"].startswith("mine-")
    assert inner[0]["session_id"] == inner[0]["request_id"] == inner[1]["request_id"]


async def test_of_two_requests_with_one_id_the_second_is_refused(omni: AsyncOmni):
    results = await asyncio.gather(
        collect(omni, "twin"), collect(omni, "twin"), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, InvalidRequestError)]
    made = [result for result in results if isinstance(result, list)]
    assert [len(refused), len(made)] == [1, 1]
    assert len(made[0]) == 2


def test_a_loop_that_ends_in_the_middle_leaves_the_engine_usable(omni: AsyncOmni):
    async def leave() -> None:
        async for _ in omni.generate(PROMPT, params(9 + 12 * 999)):
            return

    asyncio.run(leave())
    assert len(asyncio.run(collect(omni, "later"))) == 2


def test_an_interrupted_wait_ends_the_rollout_and_passes_on(monkeypatch: pytest.MonkeyPatch):
    with Omni(str(tiny_checkpoint_dir()), streaming_output=True) as omni:
        outputs = omni.generate(PROMPT, params(9 + 12 * 999), py_generator=True)
        next(outputs)
        submit, interrupted = asyncio.run_coroutine_threadsafe, threading.Event()

        def submit_then_interrupt(coroutine, loop):
            future = submit(coroutine, loop)
            if not interrupted.is_set():
                interrupted.set()
                future.result = _interrupt
            return future

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(outputs)
        with pytest.raises(SessionClosedError, match="closed"):
            omni.generate(PROMPT, params())


def _interrupt() -> None:
    raise KeyboardInterrupt
