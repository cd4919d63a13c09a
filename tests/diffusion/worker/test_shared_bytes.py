"""Arrays cross between processes by a memory without a name."""

import multiprocessing
import os

import numpy as np
import pytest

from vllm_omni.diffusion.worker.shared_bytes import SLOTS, SharedBytes

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
    read = memory.read(memory.write(array), array.shape, array.dtype.str)
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype


def kept(memory: SharedBytes, value: int, size: int = 8) -> np.ndarray:
    """What a reader gets of an array full of a value."""
    return memory.read(memory.write(np.full(size, value, np.uint8)), (size,), "|u1")


def test_an_array_that_is_held_is_left_alone(memory):
    """Also where more are held than there are slots: each is the caller's own to write to."""
    held = [kept(memory, value) for value in range(3 * SLOTS)]
    assert [array[0] for array in held] == list(range(3 * SLOTS))
    held[0][:] = 77
    assert [kept(memory, 99).sum(), held[0].sum(), held[1].sum()] == [8 * 99, 8 * 77, 8]


def test_a_slot_is_free_when_its_last_view_is_gone(memory):
    first = memory.write(np.zeros((2, 4), np.uint8))
    view = memory.read(first, (2, 4), "|u1")[1:, ::2]
    assert memory.write(np.zeros(8, np.uint8)) != first
    del view
    assert memory.write(np.zeros(8, np.uint8)) == first


def test_what_is_read_is_not_a_copy(memory):
    slot = memory.write(np.zeros(8, np.uint8))
    read = memory.read(slot, (8,), "|u1")
    read[0] = 5
    assert memory.read(slot, (8,), "|u1")[0] == 5


def test_a_larger_array_follows_a_smaller_one(memory):
    kept(memory, 1)
    assert kept(memory, 2, 100_000).sum() == 200_000


def test_an_array_outlives_the_memory(memory):
    array = kept(memory, 3)
    memory.close()
    assert array.sum() == 24
    del array


def test_closing_twice_and_using_it_afterwards(memory):
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="was closed"):
        memory.write(np.zeros(1, np.uint8))


def fill(memory: SharedBytes) -> None:
    assert memory.write(np.full(1000, 42, np.uint8)) == 0


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_another_process_fills_it_and_leaves_no_name(memory, method):
    before = set(os.listdir("/dev/shm"))
    process = multiprocessing.get_context(method).Process(target=fill, args=(memory,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert memory.read(0, (1000,), "|u1").tolist() == [42] * 1000
    assert set(os.listdir("/dev/shm")) <= before
