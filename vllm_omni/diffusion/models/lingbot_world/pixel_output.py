"""The end of a chunk: it is decoded, its columns are brought to the root and rounded to bytes.

Where several ranks decode, rank r of n holds the columns ``[r * s, (r + 1) * s)`` of every pixel
frame; columns beyond the frame are cut off. They come to the root in one exchange per chunk.
Rounding looks at one value at a time, so it may happen before or after the columns are put side by
side, and all four ways give the same bytes:

===================== ============================= =======================================
mode                  what travels                  who gets it
===================== ============================= =======================================
native                decoded floats                every rank; the root rounds
root_float            decoded floats                the root; it rounds
root_uint8_allgather  bytes that each rank rounded  every rank, on one receive arena
root_uint8_p2p        bytes that each rank rounded  the root, point to point
===================== ============================= =======================================

For float output the two byte modes fall back to root_float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Shaped, UInt8
from torch import Tensor

from vllm_omni.diffusion.distributed.parallel_state import SINGLE, ParallelState, RankGroup
from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.diffusion.models.lingbot_world.vae.columns import (
    WHOLE_FRAME,
    Columns,
    ColumnShard,
)
from vllm_omni.diffusion.models.lingbot_world.vae.config import COLOURS
from vllm_omni.diffusion.models.lingbot_world.vae.memory import (
    CoderBytes,
    decoder_bytes,
    encoder_bytes,
)
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.platforms.quarantine import TransferOwners

_LARGEST_BYTE = 255.0
CACHE_PIECE_ELEMENTS = 1 << 18
"""Elements that fit the cache of a processor in float32."""


def to_uint8(
    video: Float[Tensor, "3 pixel_frames height width"],
    *,
    piece_elements: int = CACHE_PIECE_ELEMENTS,
) -> UInt8[Tensor, "pixel_frames height width 3"]:
    """Round to bytes: ``round_half_even(clamp(v / 2 + 0.5, 0, 1).float() * 255)``.

    Halving, addition and clamp use the video's own dtype, the rest uses float32. The memory of the
    decoder's video is laid out like the result, so that nothing is transposed.

    Args:
        piece_elements: number of elements that one launch of each operation converts. A processor
            wants pieces that fit its cache, a device the whole video at once.
    """
    pixels = video.permute(1, 2, 3, 0)
    flat = pixels.reshape(-1)
    output = torch.empty_like(flat, dtype=torch.uint8)
    pieces = zip(flat.split(piece_elements), output.split(piece_elements), strict=True)
    for piece, target in pieces:
        unit = piece.div(2).add_(0.5).clamp_(0.0, 1.0)
        target.copy_(unit.float().mul_(_LARGEST_BYTE).round_())
    return output.view(pixels.shape)


def to_float(
    video: Float[Tensor, "3 pixel_frames height width"],
) -> Float32[Tensor, "pixel_frames height width 3"]:
    """Map to [0, 1] in float32: ``clamp(v * 0.5 + 0.5, 0, 1)``."""
    pixels = video.permute(1, 2, 3, 0).float()
    return pixels.mul(0.5).add_(0.5).clamp_(0.0, 1.0).contiguous()


ROOT = 0
"""Rank, in the group that shares the columns, that hands the pixels out."""

Slab = Float[Tensor, "3 pixel_frames height slab_width"]
Pixels = Shaped[Tensor, "pixel_frames height slab_width 3"]
AllPixels = Shaped[Tensor, "ranks pixel_frames height slab_width 3"]


class PixelMode(StrEnum):
    """The way in which columns get to the root."""

    NATIVE = "native"
    ROOT_FLOAT = "root_float"
    ROOT_UINT8_ALLGATHER = "root_uint8_allgather"
    ROOT_UINT8_P2P = "root_uint8_p2p"

    @classmethod
    def choose(cls, name: str, platform: str) -> PixelMode:
        """Resolve ``auto`` to bytes where tests prove them equal, and to floats on NPU."""
        if name == "auto":
            return cls.NATIVE if platform == "npu" else cls.ROOT_UINT8_ALLGATHER
        return cls(name)

    @property
    def sends_bytes(self) -> bool:
        """Whether each rank rounds its own columns before they travel."""
        return self in {PixelMode.ROOT_UINT8_ALLGATHER, PixelMode.ROOT_UINT8_P2P}


@dataclass(frozen=True, slots=True)
class PixelGather:
    """The exchange of columns on one rank. Every rank makes the same calls in the same order.

    Attributes:
        group: ranks that share the columns; the first is the root.
        owners: keeps the memory of an exchange until the device is done with it.
        piece_elements: number of elements to round at a time; ``None`` for the whole chunk.
    """

    mode: PixelMode
    group: RankGroup
    owners: TransferOwners
    piece_elements: int | None = CACHE_PIECE_ELEMENTS

    def bytes_on_root(
        self, slab: Slab, width: int
    ) -> UInt8[Tensor, "pixel_frames height width 3"] | None:
        """Return the rounded pixels of whole frames on the root, ``None`` on other ranks.

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
        """Return the pixels of whole frames in [0, 1] on the root, ``None`` on other ranks."""
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
        self,
        mine: Pixels,
        width: int,
        exchange: Callable[[Pixels, list[Tensor]], AllPixels | None],
    ) -> Shaped[Tensor, "pixel_frames height width 3"] | None:
        """Exchange, then lay the columns side by side. All memory that is touched is kept."""
        touched: list[Tensor] = [mine]
        with self.owners.kept(touched):
            received = exchange(mine, touched)
            if received is None:
                return None
            _, frames, height, slab_width, _ = received.shape
            whole = mine.new_empty(frames, height, width, COLOURS)
            touched.append(whole)
            for rank, columns in enumerate(received):
                first = rank * slab_width
                inside = min(slab_width, max(0, width - first))
                whole[:, :, first : first + inside] = columns[:, :, :inside]
            return whole

    def _exchange(self, mine: Pixels, touched: list[Tensor]) -> AllPixels | None:
        if self.mode is PixelMode.ROOT_UINT8_P2P:
            return self._point_to_point(mine, touched)
        return self._all_gather(mine, touched)

    def _all_gather(self, mine: Pixels, touched: list[Tensor]) -> AllPixels | None:
        arena = mine.new_empty(self.group.size, *mine.shape)
        touched.append(arena)
        self.group.all_gather(arena, mine)
        return arena if self.group.rank == ROOT else None

    def _gather(self, mine: Pixels, touched: list[Tensor]) -> AllPixels | None:
        # A global rank, although it is a group's: torch_npu's own gather knows no other.
        root = 0 if self.group.group is None else dist.get_global_rank(self.group.group, ROOT)
        if self.group.rank != ROOT:
            dist.gather(mine, dst=root, group=self.group.group)
            return None
        arena = mine.new_empty(self.group.size, *mine.shape)
        touched.append(arena)
        dist.gather(mine, list(arena.unbind(0)), dst=root, group=self.group.group)
        return arena

    def _point_to_point(self, mine: Pixels, touched: list[Tensor]) -> AllPixels | None:
        """Use one batch: the root receives from the others in ascending order, each sends once."""
        if self.group.rank != ROOT:
            self._wait_for([dist.P2POp(dist.isend, mine, group=self.group.group, group_peer=ROOT)])
            return None
        arena = mine.new_empty(self.group.size, *mine.shape)
        touched.append(arena)
        arena[ROOT] = mine
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


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """Decodes a chunk and hands it out, on one rank.

    The ranks of the root's sequence group decode, each its own columns. If columns are not shared,
    the root decodes alone. Every other rank holds the same latents and hands out nothing.

    Attributes:
        gather: exchange between the ranks that share the columns, or over a group of one.
    """

    vae: WanVAE
    parallel: ParallelState
    gather: PixelGather

    @property
    def _slabs(self) -> int:
        """Number of ranks that share the columns of a frame."""
        return self.gather.group.size

    @property
    def _decodes(self) -> bool:
        """Whether this rank takes part in decoding."""
        return self.parallel.decodes if self._slabs > 1 else self.parallel.is_root

    def fresh(self, kind: OutputKind) -> DecoderState | None:
        """Make the decoder state of a new session; ``None`` if this rank decodes nothing of it."""
        if kind is OutputKind.LATENT or not self._decodes:
            return None
        return DecoderState()

    def decoder_bytes(self, geometry: VideoGeometry) -> int:
        """Count the bytes of a session's decoder state on this rank."""
        return self._decoder(geometry).state if self._decodes else 0

    def encoder_bytes(self, geometry: VideoGeometry) -> int:
        """Count the bytes of a session's encoder state on this rank."""
        return self._encoder(geometry).state

    def activation_bytes(self, geometry: VideoGeometry) -> int:
        """Count what layers of the autoencoder take at most on this rank, histories apart."""
        return max(self._decoder(geometry).activations, self._encoder(geometry).activations)

    def encoder_share(self, latent_width: int) -> tuple[Columns, RankGroup]:
        """Say what this rank encodes of each frame, all of it or an even share, and who shares.

        An odd share would differ from a whole frame in its last bits, and all that follows with it.
        """
        if self._slabs == 1 or latent_width % self._slabs:
            return WHOLE_FRAME, SINGLE
        shard = ColumnShard(self.gather.group, latent_width)
        return shard, self.parallel.control

    def _decoder(self, geometry: VideoGeometry) -> CoderBytes:
        width = self._slab_width(geometry)
        return decoder_bytes(self.vae.config, self.vae.dtype, geometry.height, width)

    def _encoder(self, geometry: VideoGeometry) -> CoderBytes:
        even = geometry.latent_width % self._slabs == 0
        width = self._slab_width(geometry) if even else geometry.width
        return encoder_bytes(self.vae.config, self.vae.dtype, geometry.height, width)

    def _slab_width(self, geometry: VideoGeometry) -> int:
        return -(-geometry.latent_width // self._slabs) * SPATIAL_FACTOR

    def hand_out(
        self,
        clean: Float32[Tensor, "16 3 height width"],
        kind: OutputKind,
        state: DecoderState | None,
    ) -> tuple[Shaped[Tensor, "..."] | None, DecoderState | None]:
        """Decode a chunk if ``kind`` asks for pixels. Every rank of the world calls this.

        Returns:
            The chunk in the layout of ``kind`` on the root, ``None`` on other ranks, and the new
            state of the decoder.
        """
        if kind is OutputKind.LATENT:
            # A copy: the commit still reads the latents after whoever got them may write to them.
            return (clean.unsqueeze(0).clone() if self.parallel.is_root else None), None
        if state is None:
            return None, None
        latent_width = clean.shape[-1]
        if self._slabs == 1:
            video, state = self.vae.decode(clean, state)
        else:
            columns = ColumnShard(self.gather.group, latent_width)
            video, state = self.vae.decode(clean, state, columns)
        width = latent_width * SPATIAL_FACTOR
        on_root = (
            self.gather.floats_on_root if kind is OutputKind.FLOAT else self.gather.bytes_on_root
        )
        return on_root(video, width), state
