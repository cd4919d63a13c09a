"""Columns of several ranks become the root's pixels, byte for byte in each of four ways."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import run_ranks
from vllm_omni.diffusion.data import PIXEL_OUTPUT_MODES, DiffusionParallelConfig
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState, RankGroup
from vllm_omni.diffusion.models.lingbot_world.pixel_output import PixelGather, PixelMode
from vllm_omni.platforms.quarantine import (
    Quarantine,
    TransferOwners,
)

pytestmark = [
    pytest.mark.core_model,
    pytest.mark.diffusion,
    pytest.mark.parallel,
    pytest.mark.cpu,
]


def no_event() -> None:
    """Of a platform whose exchanges end when their call returns."""


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEIGHT, WIDTH = 7, 13
"""Neither divides evenly over two or three ranks."""


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a two-byte type in [-1.5, 1.5]; of float32 the rounding boundaries."""
    if dtype is torch.float32:
        levels = (torch.arange(512, dtype=torch.float64) / 2 - 0.5) / 255 * 2 - 1
        near = levels.float()
        limits = (torch.full_like(near, -9.0), torch.full_like(near, 9.0))
        around = [torch.nextafter(near, limit) for limit in limits]
        return torch.cat([near, *around, torch.linspace(-1.5, 1.5, 20001)])
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = patterns.view(dtype)
    return values[values.float().abs() <= 1.5]


def video_of(dtype: torch.dtype) -> torch.Tensor:
    """A video ``[3, frames, HEIGHT, WIDTH]`` that holds every value at least once."""
    values = every_value(dtype)
    frames = -(-len(values) // (3 * HEIGHT * WIDTH))
    return values.repeat(2)[: 3 * frames * HEIGHT * WIDTH].view(3, frames, HEIGHT, WIDTH)


def columns_of(video: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """A rank's columns; those beyond the frame are garbage that must not come out."""
    share = -(-WIDTH // group.size)
    padded = torch.full((*video.shape[:3], share * group.size), 0.123).to(video.dtype)
    padded[..., :WIDTH] = video
    return padded[..., group.rank * share : (group.rank + 1) * share]


def by_definition(video: torch.Tensor) -> np.ndarray:
    """The rounding rule in numpy's float32, with the two roundings of the video's own type."""
    half = (video.clamp(-1, 1) / 2 + 0.5).clamp(0, 1).float().numpy()
    return np.rint(half * np.float32(255)).astype(np.uint8).transpose(1, 2, 3, 0)


def gather_all(state: ParallelState) -> dict[tuple[str, str], tuple]:
    """Bytes and floats of every mode and type; ``None`` where nothing is handed out."""
    made = {}
    for dtype in DTYPES:
        slab = columns_of(video_of(dtype), state.sequence)
        before = slab.clone()
        for mode in PixelMode:
            gather = PixelGather(mode, state.sequence, TransferOwners(no_event))
            made[mode.value, str(dtype)] = (
                gather.bytes_on_root(slab, WIDTH),
                gather.floats_on_root(slab, WIDTH),
            )
            assert gather.owners.unfinished == []
            assert torch.equal(slab, before)
    return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_mode_gives_the_bytes_of_the_definition(ranks):
    # Bitwise, for every value of the two-byte types.
    root, *others = run_ranks(gather_all, parallel=DiffusionParallelConfig(ulysses_degree=ranks))
    for dtype in DTYPES:
        video = video_of(dtype)
        expected = by_definition(video)
        assert len(np.unique(expected)) == 256
        floats = (video.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
        for mode in PixelMode:
            as_bytes, as_floats = root[mode.value, str(dtype)]
            assert np.array_equal(as_bytes.numpy(), expected), mode
            assert torch.equal(as_floats, floats), mode
    for made in others:
        assert set(made.values()) == {(None, None)}


def test_every_value_is_there():
    assert len(every_value(torch.bfloat16)) == 2 * (0x3FC0 + 1)
    assert len(every_value(torch.float16)) == 2 * (0x3E00 + 1)


@pytest.mark.parametrize("mode", list(PixelMode))
def test_one_rank_is_native_in_every_mode(mode):
    video = video_of(torch.bfloat16)
    gather = PixelGather(mode, SINGLE, TransferOwners(no_event))
    assert np.array_equal(gather.bytes_on_root(video, WIDTH), by_definition(video))


def test_columns_that_do_not_cover_the_frame_are_refused_before_sending():
    owners = TransferOwners(no_event, Quarantine())
    gather = PixelGather(PixelMode.NATIVE, RankGroup(0, 2, None), owners)
    with pytest.raises(ValueError, match="2 ranks of 4 pixel columns do not cover a frame of 9"):
        gather.bytes_on_root(torch.zeros(3, 1, 2, 4), 9)
    assert owners.quarantine.size == 0


@pytest.mark.parametrize(
    ("name", "platform", "mode"),
    [
        ("auto", "cpu", PixelMode.ROOT_UINT8_ALLGATHER),
        ("auto", "cuda", PixelMode.ROOT_UINT8_ALLGATHER),
        ("auto", "npu", PixelMode.NATIVE),
        ("root_uint8_p2p", "npu", PixelMode.ROOT_UINT8_P2P),
    ],
)
def test_auto_is_bytes_where_they_are_proved(name, platform, mode):
    assert PixelMode.choose(name, platform) is mode


def test_the_modes_are_those_of_the_configuration():
    assert {"auto", *PixelMode} == set(PIXEL_OUTPUT_MODES)


class FakeOperation(dist.P2POp):
    def __new__(cls, *_arguments, **_options):
        return object.__new__(cls)

    def __init__(self, op, _tensor, *, group, group_peer) -> None:
        assert group is None
        self.name = f"{'send to' if op is dist.isend else 'receive from'} {group_peer}"


class FakeWork:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch):
    """Replaces point-to-point calls; returns the log and a switch for works per batch."""
    log, one_work = [], {"answer": False}

    def batch(operations):
        names = [operation.name for operation in operations]
        log.extend(names)
        return [FakeWork(log, name) for name in (["batch"] if one_work["answer"] else names)]

    monkeypatch.setattr(dist, "P2POp", FakeOperation)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    return log, one_work


@pytest.mark.parametrize("one_work", [False, True])
def test_the_root_receives_in_ascending_order_and_waits_for_all(batches, one_work):
    log, switch = batches
    switch["answer"] = one_work
    gather = PixelGather(PixelMode.ROOT_UINT8_P2P, RankGroup(0, 8, None), TransferOwners(no_event))
    assert gather.bytes_on_root(torch.zeros(3, 1, 2, 2), 16).shape == (1, 2, 16, 3)
    receives = [f"receive from {peer}" for peer in range(1, 8)]
    waits = ["wait batch"] if one_work else [f"wait {name}" for name in receives]
    assert log == receives + waits


def test_another_rank_sends_once_and_hands_out_nothing(batches):
    log, _ = batches
    gather = PixelGather(PixelMode.ROOT_UINT8_P2P, RankGroup(5, 8, None), TransferOwners(no_event))
    assert gather.bytes_on_root(torch.zeros(3, 1, 2, 2), 16) is None
    assert log == ["send to 0", "wait send to 0"]


def test_a_failed_exchange_keeps_its_owners_for_ever(monkeypatch):
    owners = TransferOwners(no_event, Quarantine())
    gather = PixelGather(PixelMode.ROOT_UINT8_P2P, RankGroup(0, 2, None), owners)
    failure = RuntimeError("the link is down")

    def fail(_operations):
        raise failure

    monkeypatch.setattr(dist, "P2POp", FakeOperation)
    monkeypatch.setattr(dist, "batch_isend_irecv", fail)
    with pytest.raises(RuntimeError) as caught:
        gather.bytes_on_root(torch.zeros(3, 1, 2, 2), 4)
    assert caught.value is failure
    (held,) = owners.quarantine.held
    assert [tensor.shape for tensor in held.owners] == [(1, 2, 2, 3), (2, 1, 2, 2, 3)]
    assert owners.unfinished == []
