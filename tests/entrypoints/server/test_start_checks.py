"""What the server needs of the machine is tried before anything starts, and named."""

import resource
from dataclasses import replace

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.other_user import needs_root, refusal_to_another_user
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.entrypoints.server import start_checks
from vllm_omni.entrypoints.server.start_checks import check_machine
from vllm_omni.errors import ConfigError

pytest_plugins = ["tests.helpers.fixtures.videos"]
pytestmark = [
    pytest.mark.core_model,
    pytest.mark.omni,
    pytest.mark.cpu,
    pytest.mark.usefixtures("storage"),
]


@pytest.fixture
def resolved(tmp_path):
    return resolve(str(write_fake_checkpoint(tmp_path / "model")))


def test_a_machine_with_everything_is_fine_and_nothing_is_left(resolved, storage):
    check_machine(resolved)
    assert list(storage.iterdir()) == []


def test_too_few_descriptors(resolved):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"may open 60 files.*68.*ulimit -n"):
            check_machine(resolved)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_temporary_folder_that_is_not_there(resolved, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"TMPDIR.*No such file or directory"):
        check_machine(resolved)


def test_no_temporary_folder_at_all(resolved, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/no", "/sys/no"])
    with pytest.raises(ConfigError, match=r"TMPDIR.*No usable temporary directory"):
        check_machine(resolved)


def test_shared_memory_that_nccl_needs(resolved, tmp_path, monkeypatch):
    monkeypatch.setattr(start_checks, "_SHARED_MEMORY", tmp_path / "shm")
    config = replace(
        resolved.config,
        executor="mp",
        device="cuda",
        parallel=DiffusionParallelConfig(ulysses_degree=2),
    )
    with pytest.raises(ConfigError, match=r"shm is needed by 2 ranks.*No such file"):
        check_machine(replace(resolved, config=config))


@needs_root
def test_too_few_processes():
    def start_a_thread():
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
        start_checks._try("none", lambda: start_checks._start_threads(1))

    said = refusal_to_another_user(start_a_thread, ConfigError)
    assert said.startswith("none: can't start new thread; raise the limit of processes")
