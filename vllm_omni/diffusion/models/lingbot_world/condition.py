"""The first picture as a condition: mask and image latents for each chunk of a session."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional as F

from vllm_omni.diffusion.distributed.parallel_state import SINGLE, RankGroup
from vllm_omni.diffusion.geometry import VideoGeometry, chunk_pixel_frames
from vllm_omni.diffusion.messages import SourceImage
from vllm_omni.diffusion.models.lingbot_world.config import MASK_CHANNELS
from vllm_omni.diffusion.models.lingbot_world.vae.columns import WHOLE_FRAME, Columns
from vllm_omni.diffusion.models.lingbot_world.vae.state import EncoderState
from vllm_omni.diffusion.models.lingbot_world.vae.vae import WanVAE
from vllm_omni.platforms.base import to_device

_LARGEST_BYTE = 255


def prepare_image(
    image: SourceImage, geometry: VideoGeometry, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "3 height width"]:
    """Map a picture to [-1, 1], then resize it to the video's size.

    Bicubic without antialiasing; overshoot beyond [-1, 1] is kept and so is no aspect ratio.
    Computed in float32 on the host, so that every device starts from the same numbers.
    """
    pixels = _signed(image)
    if pixels.shape[1:] != (geometry.height, geometry.width):
        pixels = F.interpolate(
            pixels[None],
            size=(geometry.height, geometry.width),
            mode="bicubic",
            align_corners=False,
        )[0]
    return to_device(pixels.to(dtype), device)


def _signed(image: SourceImage) -> Float32[Tensor, "3 height width"]:
    if image.signed is not None:
        return torch.tensor(image.signed).permute(2, 0, 1).contiguous()
    assert image.rgb is not None, "a SourceImage holds one of two arrays"
    pixels = torch.tensor(image.rgb).permute(2, 0, 1).float()
    return pixels.div_(_LARGEST_BYTE).mul_(2.0).sub_(1.0).contiguous()


@dataclass(frozen=True, slots=True)
class ConditionState:
    """How far a session's condition has come. A new state comes out of each call.

    Attributes:
        next_chunk_index: chunk that the next call prepares.
        encoder: history of the encoder; dropped at the fixed point.
        fixed: the condition of every chunk from the fixed point on.
        ahead: what the next call returns, where that was made before; the history is in it.
    """

    next_chunk_index: int
    encoder: EncoderState | None
    fixed: Float[Tensor, "channels 3 latent_height latent_width"] | None
    ahead: tuple[Float[Tensor, "channels 3 latent_height latent_width"], ConditionState] | None = (
        None
    )

    def bytes(self) -> int:
        """Count the bytes of all tensors held."""
        if self.fixed is not None:
            return self.fixed.nbytes
        if self.ahead is not None:
            condition, following = self.ahead
            return condition.nbytes + following.bytes()
        return 0 if self.encoder is None else self.encoder.bytes()


@dataclass(frozen=True, slots=True)
class ConditionEncoder:
    """Makes the condition of one chunk after another of a session.

    After the picture every pixel frame is zero (mid grey). The causal encoder forgets the
    picture, so its history stops changing; from then on the same condition comes out for ever
    and nothing is computed. That point is proved by comparing bits, never assumed.

    Attributes:
        image: first pixel frame, as :func:`prepare_image` makes it.
        dtype: of the condition, the transformer's.
        columns: what this rank encodes of each frame.
        ranks: all that encode, if they share; none stops before no history changes any more.
    """

    vae: WanVAE
    image: Float[Tensor, "3 height width"]
    dtype: torch.dtype
    columns: Columns = WHOLE_FRAME
    ranks: RankGroup = SINGLE

    @staticmethod
    def fresh() -> ConditionState:
        """Return the state of a session that has not begun."""
        return ConditionState(0, EncoderState(), None)

    def next_chunk(
        self, state: ConditionState
    ) -> tuple[Float[Tensor, "channels 3 latent_height latent_width"], ConditionState]:
        """Return mask (4 channels) and normalised image latents of the next chunk.

        Returns:
            The condition, which the caller must not write to, and the session's new state.
        """
        if state.ahead is not None:
            return state.ahead
        chunk_index = state.next_chunk_index
        if state.fixed is not None:
            return state.fixed, ConditionState(chunk_index + 1, None, state.fixed)
        assert state.encoder is not None, "without a fixed condition there is a history"
        latents, encoder = self.vae.encode(self._pixels(chunk_index), state.encoder, self.columns)
        mask = latents.new_zeros(MASK_CHANNELS, *latents.shape[1:])
        if chunk_index == 0:
            mask[:, 0] = 1.0
        condition = torch.cat([mask, latents]).to(self.dtype)
        changing = chunk_index == 0 or not encoder.same_history(state.encoder)
        if not self.ranks.any(flag=changing):
            return condition, ConditionState(chunk_index + 1, None, condition)
        return condition, ConditionState(chunk_index + 1, encoder, None)

    def make_ahead(self, state: ConditionState) -> ConditionState:
        """Make the next chunk's condition now, so that no control has to wait for it.

        No control decides a condition, so it is the same bit for bit.
        """
        if state.fixed is not None:
            return state
        return ConditionState(state.next_chunk_index, None, None, self.next_chunk(state))

    def _pixels(self, chunk_index: int) -> Float[Tensor, "3 pixel_frames height width"]:
        """Return the picture followed by zeros for chunk 0, and zeros for every later chunk."""
        images = 1 if chunk_index == 0 else 0
        grey_frames = chunk_pixel_frames(chunk_index) - images
        grey = self.image.new_zeros(1).expand(3, grey_frames, *self.image.shape[1:])
        return torch.cat([self.image[:, None], grey], dim=1) if images else grey
