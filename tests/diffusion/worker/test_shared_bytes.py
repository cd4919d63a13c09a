"""Arrays cross between processes by a memory without a name."""

import multiprocessing
import os

import numpy as np
import pytest

from vllm_omni.diffusion.worker.shared_bytes import SharedBytes

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.fixture
def memory():
    made = SharedBytes.create()
    yield made
    made.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.linspace(-1, 1, 30, dtype=np.float32).reshape(1, 5, 6),
        np.arange(60, dtype=np.uint8).reshape(3, 4, 5).transpose(2, 0, 1),
    ],
    ids=["bytes", "floats", "strided"],
)
def test_what_is_written_is_read(memory, array):
    memory.write(array)
    read = memory.read(array.shape, array.dtype.str)
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype


def test_a_read_array_is_the_callers_own(memory):
    memory.write(np.zeros(8, np.uint8))
    first = memory.read((8,), "|u1")
    memory.write(np.ones(8, np.uint8))
    assert first.sum() == 0
    first[:] = 7
    assert memory.read((8,), "|u1").sum() == 8


def test_it_grows_and_does_not_shrink(memory):
    assert memory.size == 0
    memory.write(np.zeros(100, np.uint8))
    memory.write(np.zeros(10, np.uint8))
    assert memory.size == 100


def test_less_than_announced_is_an_error(memory):
    memory.write(np.zeros(10, np.uint8))
    with pytest.raises(ValueError, match="20 bytes were announced, 10 are there"):
        memory.read((20,), "|u1")


def test_closing_twice_and_using_it_afterwards(memory):
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="was closed"):
        memory.write(np.zeros(1, np.uint8))


def fill(memory: SharedBytes) -> None:
    memory.write(np.full(1000, 42, np.uint8))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_another_process_fills_it_and_leaves_no_name(memory, method):
    before = set(os.listdir("/dev/shm"))
    process = multiprocessing.get_context(method).Process(target=fill, args=(memory,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert memory.read((1000,), "|u1").tolist() == [42] * 1000
    assert set(os.listdir("/dev/shm")) <= before
