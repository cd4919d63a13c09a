"""Start, warm-up and restart of worker groups."""

import pytest

from tests.helpers.fake_executor import FakeExecutor
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.engine.supervisor import MAX_RESTARTS, WorkerSupervisor
from vllm_omni.errors import WorkerFailedError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def test_warm_up_fills_the_window_and_rolls_it_once():
    executor = FakeExecutor()
    supervisor = WorkerSupervisor(lambda: executor, warm_up=VideoGeometry(64, 96))
    supervisor.start()
    # A window of 9 latent frames is 3 chunks; two more make it roll.
    assert [plan.chunk_index for plan in executor.plans] == [0, 1, 2, 3, 4]
    assert executor.open_ids == []


def test_restarts_back_off_and_stop():
    slept = []
    supervisor = WorkerSupervisor(FakeExecutor, warm_up=None, sleep=slept.append)
    supervisor.start()
    for _ in range(MAX_RESTARTS):
        supervisor.relaunch()
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    with pytest.raises(WorkerFailedError, match="5 times within 10 minutes"):
        supervisor.relaunch()


def test_a_group_that_fails_to_start_again_is_retried():
    class Broken(FakeExecutor):
        def start(self):
            raise WorkerFailedError("no port")

    made = iter([FakeExecutor(), Broken(), FakeExecutor()])
    supervisor = WorkerSupervisor(lambda: next(made), warm_up=None, sleep=lambda _: None)
    supervisor.start()
    assert supervisor.relaunch().sessions == 1
    assert supervisor.restarts == 2


def test_without_a_group_every_use_says_so():
    supervisor = WorkerSupervisor(FakeExecutor, warm_up=None)
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = supervisor.executor
    supervisor.start()
    supervisor.shutdown()
    supervisor.shutdown()
    with pytest.raises(WorkerFailedError):
        _ = supervisor.executor
