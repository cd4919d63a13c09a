"""Width-sharded coders over real process groups, against the unsharded ones.

Even splits are claimed bitwise: every output sums the same products in the same order. Odd splits
change the width that the kernels see, hence 2e-6.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.helpers.mark import advanced
from tests.helpers.vae_builders import random_latents, tiny_vae
from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.models.lingbot_world.vae.columns import (
    WHOLE_FRAME,
    Columns,
    ColumnShard,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState, EncoderState

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.parallel, pytest.mark.cpu]

HEIGHT = 32
LATENT_WIDTHS = {2: (4, 12, 7, 3), 3: (6, 12, 7, 4)}
"""Even and odd ones; four columns on three ranks leave the last rank none inside the frame."""


@dataclass(frozen=True)
class Case:
    """What one rank brings back of decoding two chunks."""

    video: Tensor
    state_bytes: int
    slab_width: int
    latents: Tensor
    encoder_bytes: int


def decode_sharded(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank,
                            world_size=size)  # fmt: skip
    group = RankGroup(rank=rank, size=size, group=dist.group.WORLD)
    cases = {width: decode_case(group, width) for width in LATENT_WIDTHS[size]}
    torch.save(cases, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


@torch.inference_mode()
def decode_case(group: RankGroup, latent_width: int) -> Case:
    columns = ColumnShard(group, latent_width)
    state, videos = DecoderState(), []
    slab_width = 0
    for chunk in random_latents(6, HEIGHT, 8 * latent_width).split(3, dim=1):
        slab, state = tiny_vae().decode(chunk, state, columns)
        slab_width = slab.shape[-1]
        videos.append(columns.gather(slab.permute(1, 2, 3, 0)))
    latents, encoder = encoded(latent_width, columns)
    return Case(torch.cat(videos), state.bytes(), slab_width, latents, encoder.bytes())


def encoded(latent_width: int, columns: Columns) -> tuple[Tensor, EncoderState]:
    """Latents of two chunks of noise, whole on every rank, and the state after them."""
    noise = torch.Generator().manual_seed(latent_width)
    pixels = torch.rand(3, 21, HEIGHT, 8 * latent_width, generator=noise) * 2 - 1
    first, state = tiny_vae().encode(pixels[:, :9], EncoderState(), columns)
    second, state = tiny_vae().encode(pixels[:, 9:], state, columns)
    return torch.cat([first, second], dim=1), state


@pytest.fixture(scope="module", params=[2, advanced(3)])
def sharded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[int, Case]]:
    """Results of each rank, by latent width."""
    directory: Path = tmp_path_factory.mktemp("shard")
    mp.spawn(decode_sharded, args=(request.param, str(directory)), nprocs=request.param)
    return [
        torch.load(directory / f"rank{rank}.pt", weights_only=False)
        for rank in range(request.param)
    ]


@torch.inference_mode()
def whole(latent_width: int) -> tuple[Tensor, int]:
    state, videos = DecoderState(), []
    for chunk in random_latents(6, HEIGHT, 8 * latent_width).split(3, dim=1):
        video, state = tiny_vae().decode(chunk, state)
        videos.append(video.permute(1, 2, 3, 0))
    return torch.cat(videos), state.bytes()


def test_every_rank_gathers_the_unsharded_video(sharded: list[dict[int, Case]]):
    size = len(sharded)
    for width in LATENT_WIDTHS[size]:
        expected, _ = whole(width)
        for cases in sharded:
            video = cases[width].video
            torch.testing.assert_close(video, expected, rtol=0, atol=2e-6)
            if width % size == 0:
                assert torch.equal(video, expected), f"width {width} on {size} ranks"


def test_every_rank_gathers_the_latents_of_whole_frames(sharded: list[dict[int, Case]]):
    size = len(sharded)
    for width in LATENT_WIDTHS[size]:
        with torch.inference_mode():
            expected, state = encoded(width, WHOLE_FRAME)
        for cases in sharded:
            torch.testing.assert_close(cases[width].latents, expected, rtol=0, atol=2e-6)
            assert cases[width].encoder_bytes * width == state.bytes() * -(-width // size)
            if width % size == 0:
                assert torch.equal(cases[width].latents, expected), f"{width} on {size} ranks"


def test_each_rank_keeps_its_share_of_the_state(sharded: list[dict[int, Case]]):
    size = len(sharded)
    for width in LATENT_WIDTHS[size]:
        _, whole_bytes = whole(width)
        share = -(-width // size)
        for cases in sharded:
            assert cases[width].state_bytes * width == whole_bytes * share
            assert cases[width].slab_width == 8 * share


def test_one_rank_is_the_whole_frame():
    """Bitwise: the halo of a rank that is alone is the zero padding."""
    case = decode_case(SINGLE, 5)
    expected, state_bytes = whole(5)
    assert torch.equal(case.video, expected)
    assert case.state_bytes == state_bytes


@dataclass(frozen=True)
class Recorded(ColumnShard):
    """One of several ranks, with neighbours whose borders are given."""

    left: Tensor | None
    right: Tensor | None

    def swap(self, left: Tensor, right: Tensor) -> tuple[Tensor | None, Tensor | None]:
        assert left.is_contiguous()
        assert right.is_contiguous()
        return self.left, self.right

    def gather_slabs(self, slab: Tensor) -> Tensor:
        group = self.group
        return torch.stack([slab + 100 * (rank - group.rank) for rank in range(group.size)])


def place(rank: int, size: int) -> RankGroup:
    return RankGroup(rank, size, None)


def columns_of(frame: Tensor) -> list[float]:
    return frame[0, 0, :, 0].tolist()


def frame_of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def bordered(shard: ColumnShard, slab: Tensor) -> list[float]:
    frames, own = shard.room(*slab.shape[:3], slab)
    frames.fill_(float("nan"))
    own.copy_(slab)
    shard.fill_borders(frames)
    return columns_of(frames)


def test_borders_are_the_neighbours_and_columns_beyond_the_frame_are_zeros():
    """Five latent columns on three ranks, at twice the resolution: ten of twelve are inside."""
    neighbour = frame_of(7.0)
    last = Recorded(place(2, 3), 5, neighbour, None)
    assert bordered(last, frame_of(1, 2, 3, 4)) == [7, 1, 2, 0, 0, 0]
    middle = Recorded(place(1, 3), 5, neighbour, frame_of(8.0))
    assert bordered(middle, frame_of(1, 2, 3, 4)) == [7, 1, 2, 3, 4, 8]
    first = Recorded(place(0, 3), 5, None, neighbour)
    assert bordered(first, frame_of(1, 2, 3, 4)) == [0, 1, 2, 3, 4, 7]


def test_the_next_column_is_the_neighbours_and_columns_beyond_the_frame_are_zeros():
    """The same columns; the row below is zeros."""
    slab, neighbour = frame_of(1, 2, 3, 4), frame_of(8.0)
    for rank, right, expected in (
        (0, neighbour, [1, 2, 3, 4, 8]),
        (2, None, [1, 2, 0, 0, 0]),
    ):
        made = Recorded(place(rank, 3), 5, None, right).right_and_below(slab)
        assert columns_of(made) == expected
        assert columns_of(made[:, 1:]) == [0] * 5


def test_a_rank_wholly_beyond_the_frame_sees_zeros():
    """Five latent columns on four ranks: the third ends them with one of its two."""
    shard = Recorded(place(3, 4), 5, frame_of(7.0), None)
    assert bordered(shard, frame_of(1, 2, 3, 4)) == [7, 0, 0, 0, 0, 0]
    assert columns_of(shard.right_and_below(frame_of(1, 2, 3, 4))) == [0] * 5


def test_own_and_gather_undo_each_other_up_to_the_padding():
    shard = Recorded(place(1, 3), 5, None, None)
    assert columns_of(shard.own(frame_of(1, 2, 3, 4, 5))) == [3, 4]
    last = Recorded(place(2, 3), 5, None, None)
    assert columns_of(last.own(frame_of(1, 2, 3, 4, 5))) == [5, 0]
    assert columns_of(shard.gather(frame_of(3, 4))) == [-97, -96, 3, 4, 103]
