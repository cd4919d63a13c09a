"""The folder of finished videos: private, tried at start, refused before anything is made."""

import fcntl
import os
import resource
import time
from contextlib import contextmanager

import pytest

from tests.helpers.videos import BODY, SYNC, URL, job_that_is, stored_files
from vllm_omni.entrypoints.server.http_errors import HttpRefusalError
from vllm_omni.entrypoints.server.video_store import VideoStore
from vllm_omni.errors import ConfigError

pytest_plugins = ["tests.helpers.fixtures.videos"]
pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

NAME = "VLLM_OMNI_SERVER_STORAGE__PATH"


@contextmanager
def largest_file(num_bytes: int):
    """Let the system refuse larger files, as a disk does that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def a_file(folder):
    folder.write_text("a file where the folder should be")


def below_a_file(folder):
    folder.parent.joinpath("occupied").write_text("")
    return folder.parent / "occupied" / "storage"


def a_circle(folder):
    folder.symlink_to(folder)


@pytest.mark.parametrize("spoil", [a_file, below_a_file, a_circle])
def test_a_folder_that_cannot_be_made_is_refused_at_start(storage, spoil, monkeypatch):
    place = spoil(storage) or storage
    monkeypatch.setenv(NAME, str(place))
    with pytest.raises(ConfigError) as caught:
        VideoStore.try_out()
    assert str(place) in str(caught.value)
    assert NAME in str(caught.value)


def test_a_disk_without_room_is_refused_at_start(storage):
    with largest_file(100), pytest.raises(ConfigError, match="File too large"):
        VideoStore.try_out()
    assert list(storage.iterdir()) == []


def test_the_folder_is_private_and_goes_with_its_server(tmp_path, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = VideoStore()
    file = store.put("a.mp4", b"video")
    assert file.parent.parent == tmp_path
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.read_bytes() == b"video"
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_only_left_overs_of_dead_servers_are_removed(storage):
    storage.mkdir()
    dead, alive, new, foreign = (
        storage / name
        for name in ("vllm-omni-videos-dead", "vllm-omni-videos-b", "vllm-omni-videos-c", "other")
    )
    for folder in (dead, alive, new, foreign):
        folder.mkdir()
        (folder / "a.mp4").write_bytes(b"video")
        os.utime(folder, (time.time() - 60,) * 2)
    os.utime(new)
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        VideoStore.try_out()
    finally:
        os.close(lock)
    assert {folder.name for folder in storage.iterdir()} == {alive.name, new.name, foreign.name}


@pytest.mark.usefixtures("storage")
def test_a_video_larger_than_the_room_is_refused():
    with pytest.raises(HttpRefusalError, match=f"needs about {2**80} bytes") as caught:
        VideoStore().require_room(2**80)
    assert caught.value.status == 503


async def test_a_job_without_a_store_is_refused_before_it_computes(server, executor, storage):
    a_file(storage)
    answer = await server.http.post(URL, json=BODY)
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert "no video can be stored" in message
    assert NAME in message
    assert str(storage) not in message
    assert executor.plans == []
    assert (await server.http.get(URL)).json()["data"] == []
    assert (await server.http.post(SYNC, json=BODY)).status_code == 200


async def test_a_temporary_folder_that_fills_up_says_why(server, executor, storage):
    executor.gate.clear()
    job = (await server.http.post(URL, json=BODY)).json()
    await job_that_is(server, job["id"], "in_progress")
    with largest_file(100):
        executor.gate.set()
        failed = await job_that_is(server, job["id"], "failed")
    assert failed["error"]["code"] == "503"
    assert "the finished video of " in failed["error"]["message"]
    assert "File too large" in failed["error"]["message"]
    assert "(TMPDIR)" in failed["error"]["message"]
    assert stored_files(storage) == []


async def test_a_storage_that_breaks_while_a_video_is_made_says_why(
    server, executor, storage, caplog
):
    executor.gate.clear()
    job = (await server.http.post(URL, json=BODY)).json()
    await job_that_is(server, job["id"], "in_progress")
    next(storage.iterdir()).rmdir()
    storage.rmdir()
    a_file(storage)
    executor.gate.set()
    failed = await job_that_is(server, job["id"], "failed")
    assert failed["error"]["code"] == "503"
    assert "the finished video of " in failed["error"]["message"]
    assert f"File exists (storage, {NAME})" in failed["error"]["message"]
    assert str(storage) in caplog.text


async def test_a_folder_that_was_cleaned_away_is_made_anew(server, storage):
    first = (await server.http.post(URL, json=BODY)).json()["id"]
    await job_that_is(server, first, "completed")
    stored_files(storage)[0].unlink()
    next(storage.iterdir()).rmdir()
    gone = await server.http.get(f"{URL}/{first}/content")
    assert gone.status_code == 410
    assert "was removed" in gone.json()["error"]["message"]
    second = (await server.http.post(URL, json=BODY)).json()["id"]
    await job_that_is(server, second, "completed")
    assert (await server.http.get(f"{URL}/{second}/content")).status_code == 200
