"""The way of events from the engine to a loop."""

import asyncio
import threading

import pytest

from vllm_omni.engine.session import Opened, Waiting
from vllm_omni.entrypoints.engine_client import EventQueue

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


async def test_events_of_another_thread_arrive_in_order():
    events = EventQueue()
    sent = [Waiting(2), Waiting(1), Opened(0.0)]
    threading.Thread(target=lambda: [events.put(event) for event in sent]).start()
    assert [await events.get() for _ in sent] == sent


def test_a_closed_loop_is_no_error_for_the_engine():
    async def make() -> EventQueue:
        return EventQueue()

    events = asyncio.run(make())
    events.put(Opened(0.0))
