"""Start, warm-up and restart of worker groups."""

import threading
import time

import pytest

from tests.helpers.fake_executor import FakeExecutor, make_request
from vllm_omni.engine.supervisor import MAX_RESTARTS, WorkerSupervisor
from vllm_omni.errors import (
    CheckpointError,
    ConfigError,
    DeviceOutOfMemoryError,
    OmniError,
    OutOfKVMemoryError,
    WorkerFailedError,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

WARM_UP = make_request()


def test_warm_up_fills_the_window_and_rolls_it_once():
    executor = FakeExecutor()
    supervisor = WorkerSupervisor(lambda: executor, warm_up=WARM_UP)
    supervisor.start()
    # A window of 9 latent frames is 3 chunks; two more make it roll.
    assert [plan.chunk_index for plan in executor.plans] == [0, 1, 2, 3, 4]
    assert executor.open_ids == []


def test_each_chunk_of_the_warm_up_is_logged(caplog):
    caplog.set_level("INFO", "vllm_omni")
    WorkerSupervisor(FakeExecutor, warm_up=WARM_UP).start()
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.startswith("warm-up")] == [
        f"warm-up: chunk {number} of 5" for number in range(1, 6)
    ]


def test_a_group_that_comes_up_after_the_end_is_not_warmed_up():
    executor = FakeExecutor()
    supervisor = WorkerSupervisor(lambda: executor, warm_up=WARM_UP)
    bring_up = executor.start

    def start():
        supervisor.shutdown()
        return bring_up()

    executor.start = start
    with pytest.raises(WorkerFailedError, match="was shut down"):
        supervisor.start()
    assert executor.plans == []
    assert executor.shut_down == 1


def test_restarts_back_off_and_stop():
    slept = []
    supervisor = WorkerSupervisor(FakeExecutor, warm_up=None, sleep=slept.append)
    supervisor.start()
    for _ in range(MAX_RESTARTS):
        supervisor.relaunch()
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0]
    with pytest.raises(WorkerFailedError, match="5 times within 10 minutes"):
        supervisor.relaunch()


class Broken(FakeExecutor):
    """Raises when it starts, or when it makes a chunk."""

    def __init__(self, error: BaseException, *, in_warm_up: bool = False) -> None:
        super().__init__()
        self.error, self.in_warm_up = error, in_warm_up

    def start(self):
        if not self.in_warm_up:
            raise self.error
        return super().start()

    def run_chunk(self, _plan, _deliver):
        raise self.error


@pytest.mark.parametrize(
    "broken",
    [
        Broken(WorkerFailedError("no port")),
        Broken(OutOfKVMemoryError("the dead rank's memory is not back yet")),
        Broken(DeviceOutOfMemoryError("nor is it for a chunk"), in_warm_up=True),
    ],
    ids=lambda broken: type(broken.error).__name__,
)
def test_a_group_that_fails_to_start_again_is_retried(broken: Broken):
    made = iter([FakeExecutor(), broken, FakeExecutor()])
    slept: list[float] = []
    supervisor = WorkerSupervisor(lambda: next(made), warm_up=WARM_UP, sleep=slept.append)
    supervisor.start()
    assert supervisor.relaunch().sessions == 1
    assert slept == [0.5, 1.0]
    assert broken.shut_down == 1


@pytest.mark.parametrize("error", [CheckpointError("no weights"), ConfigError("no such device")])
def test_what_no_restart_can_mend_is_final(error: OmniError):
    made = iter([FakeExecutor(), Broken(error), FakeExecutor()])
    slept: list[float] = []
    supervisor = WorkerSupervisor(lambda: next(made), warm_up=None, sleep=slept.append)
    supervisor.start()
    with pytest.raises(type(error)):
        supervisor.relaunch()
    assert slept == [0.5]


@pytest.mark.parametrize("in_warm_up", [False, True])
@pytest.mark.parametrize("error", [WorkerFailedError("no port"), KeyboardInterrupt()])
def test_a_failed_start_leaves_no_workers_while_its_error_is_held(
    error: BaseException, in_warm_up: bool
):
    broken = Broken(error, in_warm_up=in_warm_up)
    supervisor = WorkerSupervisor(lambda: broken, warm_up=WARM_UP)
    with pytest.raises(type(error)):
        supervisor.start()
    assert broken.shut_down == 1
    supervisor.shutdown()
    assert broken.shut_down == 1


def test_a_shutdown_ends_the_wait_before_a_restart():
    supervisor = WorkerSupervisor(FakeExecutor, warm_up=None)
    supervisor.start()
    for _ in range(MAX_RESTARTS - 1):
        supervisor._count_restart(None)  # The next wait would take 8 s.
    timer = threading.Timer(0.1, supervisor.shutdown)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(WorkerFailedError, match="shut down"):
        supervisor.relaunch()
    assert time.monotonic() - began_s < 4
    timer.join()


def test_without_a_group_every_use_says_so():
    supervisor = WorkerSupervisor(FakeExecutor, warm_up=None)
    with pytest.raises(WorkerFailedError, match="not running"):
        _ = supervisor.executor
    supervisor.start()
    supervisor.shutdown()
    supervisor.shutdown()
    with pytest.raises(WorkerFailedError):
        _ = supervisor.executor
