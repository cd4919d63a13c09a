"""Brings the columns that the ranks have decoded to the root, in one of four ways.

Rank r of n holds columns ``[r * s, (r + 1) * s)`` of every pixel frame; columns beyond the frame
are cut off. Rounding to bytes looks at one value at a time, so it commutes with putting columns
side by side, and all four ways give the same bytes. One exchange per chunk.

===================== ============================= =======================================
mode                  what travels                  who gets it
===================== ============================= =======================================
native                decoded floats                every rank; the root rounds
root_float            decoded floats                the root; it rounds
root_uint8_allgather  bytes that each rank rounded  every rank, on one receive arena
root_uint8_p2p        bytes that each rank rounded  the root, point to point
===================== ============================= =======================================

Float pixels cannot travel as bytes: for them the two byte modes do as ``root_float`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist
from jaxtyping import Float, Float32, Shaped, UInt8
from torch import Tensor

from vllm_omni.diffusion.distributed.parallel_state import RankGroup
from vllm_omni.diffusion.models.lingbot_world.pixel_output import (
    CACHE_PIECE_ELEMENTS,
    to_float,
    to_uint8,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS
from vllm_omni.platforms.quarantine import TransferOwners

ROOT = 0
"""Group rank of the one that hands pixels out."""

Slab = Float[Tensor, "3 pixel_frames height slab_width"]
Part = Shaped[Tensor, "pixel_frames height slab_width 3"]
Parts = Shaped[Tensor, "ranks pixel_frames height slab_width 3"]


class PixelMode(StrEnum):
    """How columns get to the root."""

    NATIVE = "native"
    ROOT_FLOAT = "root_float"
    ROOT_UINT8_ALLGATHER = "root_uint8_allgather"
    ROOT_UINT8_P2P = "root_uint8_p2p"

    @classmethod
    def choose(cls, name: str, platform: str) -> PixelMode:
        """Resolve ``auto``: bytes where tests prove them equal, floats where nobody has yet."""
        if name == "auto":
            return cls.NATIVE if platform == "npu" else cls.ROOT_UINT8_ALLGATHER
        return cls(name)

    @property
    def sends_bytes(self) -> bool:
        """Whether each rank rounds its own columns."""
        return self in {PixelMode.ROOT_UINT8_ALLGATHER, PixelMode.ROOT_UINT8_P2P}


@dataclass(frozen=True, slots=True)
class PixelGather:
    """One rank's side of the exchange. Every rank makes the same calls in the same order.

    Attributes:
        group: ranks that share the columns; its first is the root.
        owners: keeps what an exchange touches until the device is done with it.
        piece_elements: elements that are rounded at a time; ``None`` for the whole chunk.
    """

    mode: PixelMode
    group: RankGroup
    owners: TransferOwners
    piece_elements: int | None = CACHE_PIECE_ELEMENTS

    def bytes_on_root(
        self, slab: Slab, width: int
    ) -> UInt8[Tensor, "pixel_frames height width 3"] | None:
        """Rounded pixels of the whole frame; ``None`` on other ranks than the root.

        Args:
            width: true width of the frame in pixels.

        Raises:
            ValueError: before anything is sent, if the ranks' columns do not cover the frame.
        """
        if self.group.size == 1:
            return self._rounded(slab)[:, :, :width]
        self._check_cover(slab, width)
        if self.mode.sends_bytes:
            return self._assembled(self._rounded(slab), width, self._exchange)
        video = self._float_video(slab, width)
        return None if video is None else self._rounded(video)

    def floats_on_root(
        self, slab: Slab, width: int
    ) -> Float32[Tensor, "pixel_frames height width 3"] | None:
        """Pixels in [0, 1] of the whole frame; ``None`` on other ranks than the root."""
        if self.group.size == 1:
            return to_float(slab)[:, :, :width]
        self._check_cover(slab, width)
        video = self._float_video(slab, width)
        return None if video is None else to_float(video)

    def _float_video(
        self, slab: Slab, width: int
    ) -> Float[Tensor, "3 pixel_frames height width"] | None:
        exchange = self._all_gather if self.mode is PixelMode.NATIVE else self._gather
        pixels = self._assembled(slab.permute(1, 2, 3, 0).contiguous(), width, exchange)
        return None if pixels is None else pixels.permute(3, 0, 1, 2)

    def _assembled(
        self, part: Part, width: int, exchange: Callable[[Part, list[Tensor]], Parts | None]
    ) -> Shaped[Tensor, "pixel_frames height width 3"] | None:
        """Exchange, then lay the columns side by side. Holds on to all memory it touches."""
        touched: list[Tensor] = [part]
        with self.owners.kept(touched):
            parts = exchange(part, touched)
            if parts is None:
                return None
            _, frames, height, slab_width, _ = parts.shape
            whole = part.new_empty(frames, height, width, COLOURS)
            touched.append(whole)
            for rank, columns in enumerate(parts):
                first = rank * slab_width
                inside = min(slab_width, max(0, width - first))
                whole[:, :, first : first + inside] = columns[:, :, :inside]
            return whole

    def _exchange(self, part: Part, touched: list[Tensor]) -> Parts | None:
        if self.mode is PixelMode.ROOT_UINT8_P2P:
            return self._point_to_point(part, touched)
        return self._all_gather(part, touched)

    def _all_gather(self, part: Part, touched: list[Tensor]) -> Parts | None:
        arena = part.new_empty(self.group.size, *part.shape)
        touched.append(arena)
        self.group.all_gather(arena, part)
        return arena if self.group.rank == ROOT else None

    def _gather(self, part: Part, touched: list[Tensor]) -> Parts | None:
        # A global rank, although it is a group's: torch_npu's own gather knows no other.
        root = 0 if self.group.group is None else dist.get_global_rank(self.group.group, ROOT)
        if self.group.rank != ROOT:
            dist.gather(part, dst=root, group=self.group.group)
            return None
        arena = part.new_empty(self.group.size, *part.shape)
        touched.append(arena)
        dist.gather(part, list(arena.unbind(0)), dst=root, group=self.group.group)
        return arena

    def _point_to_point(self, part: Part, touched: list[Tensor]) -> Parts | None:
        """One batch: the root receives from the others in ascending order, each sends once."""
        if self.group.rank != ROOT:
            self._wait_for([dist.P2POp(dist.isend, part, group=self.group.group, group_peer=ROOT)])
            return None
        arena = part.new_empty(self.group.size, *part.shape)
        touched.append(arena)
        arena[ROOT] = part
        self._wait_for(
            [
                dist.P2POp(dist.irecv, arena[peer], group=self.group.group, group_peer=peer)
                for peer in range(1, self.group.size)
            ]
        )
        return arena

    def _wait_for(self, operations: list[dist.P2POp]) -> None:
        # A backend may answer one batch with one work or with one per operation.
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _rounded(self, video: Slab) -> UInt8[Tensor, "pixel_frames height slab_width 3"]:
        return to_uint8(video, piece_elements=self.piece_elements or video.numel())

    def _check_cover(self, slab: Slab, width: int) -> None:
        if slab.shape[3] * self.group.size < width:
            raise ValueError(
                f"{self.group.size} ranks of {slab.shape[3]} pixel columns do not cover a frame "
                f"of {width}"
            )
