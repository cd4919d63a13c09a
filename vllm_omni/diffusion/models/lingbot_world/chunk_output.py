"""What a rank hands out of a chunk: latents, pixels, or nothing but its part in the decode.

The ranks of the root's sequence group decode, each its own columns; where columns are not shared,
the root alone. Every other rank holds the same latents and would decode the same pixels again.
"""

from dataclasses import dataclass

from jaxtyping import Float32, Shaped
from torch import Tensor

from vllm_omni.diffusion.distributed.parallel_state import ParallelState
from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.messages import OutputKind
from vllm_omni.diffusion.models.lingbot_world.pixel_gather import PixelGather
from vllm_omni.diffusion.models.lingbot_world.vae.spatial_shard import ColumnShard, GroupExchange
from vllm_omni.diffusion.models.lingbot_world.vae.state import DecoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The end of a chunk on one rank.

    Attributes:
        gather: over the ranks that share the columns; a group of one where nobody does.
    """

    vae: WanVAE
    parallel: ParallelState
    gather: PixelGather

    @property
    def _slabs(self) -> int:
        """Ranks that share the columns of a frame."""
        return self.gather.group.size

    @property
    def _decodes(self) -> bool:
        """Whether this rank takes part in decoding."""
        return self.parallel.decodes if self._slabs > 1 else self.parallel.is_root

    def fresh(self, kind: OutputKind) -> DecoderState | None:
        """Decoder state of a session that has not begun; ``None`` where nothing is decoded."""
        if kind is OutputKind.LATENT or not self._decodes:
            return None
        return DecoderState.fresh()

    def decoder_bytes(self, geometry: VideoGeometry) -> int:
        """Bytes that a session's decoder state takes on this rank."""
        if not self._decodes:
            return 0
        slab_width = -(-geometry.latent_width // self._slabs) * SPATIAL_FACTOR
        return self.vae.decoder_state_bytes(geometry.height, slab_width)

    def hand_out(
        self,
        clean: Float32[Tensor, "16 3 height width"],
        kind: OutputKind,
        state: DecoderState | None,
    ) -> tuple[Shaped[Tensor, "..."] | None, DecoderState | None]:
        """The chunk in the layout of ``kind``, on the root only, and the decoder's new state.

        Every rank that decodes takes part in each of its exchanges.
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
            columns = ColumnShard(GroupExchange(self.gather.group), latent_width)
            video, state = self.vae.decode(clean, state, columns)
        width = latent_width * SPATIAL_FACTOR
        on_root = (
            self.gather.floats_on_root if kind is OutputKind.FLOAT else self.gather.bytes_on_root
        )
        return on_root(video, width), state
