"""Sizes in pixels, latents and tokens, and the count of frames in chunks."""

import math
from dataclasses import dataclass

from vllm_omni.errors import InvalidRequestError

SPATIAL_FACTOR = 8
"""Pixels per latent row or column (the VAE's stride)."""
PATCH = 2
"""Latent rows or columns per token (the transformer's patch)."""
PIXELS_PER_TOKEN = SPATIAL_FACTOR * PATCH
LATENT_FRAMES_PER_CHUNK = 3
TEMPORAL_FACTOR = 4
"""Pixel frames per latent frame, except the first of a session, which makes one."""
FIRST_CHUNK_PIXEL_FRAMES = 1 + (LATENT_FRAMES_PER_CHUNK - 1) * TEMPORAL_FACTOR
CHUNK_PIXEL_FRAMES = LATENT_FRAMES_PER_CHUNK * TEMPORAL_FACTOR


@dataclass(frozen=True, slots=True)
class VideoGeometry:
    """Size of a video in pixels and everything that follows from it.

    Raises:
        InvalidRequestError: if a side is not a positive multiple of 16 pixels.
    """

    height: int
    width: int

    def __post_init__(self) -> None:
        for name, value in (("height", self.height), ("width", self.width)):
            if value < PIXELS_PER_TOKEN or value % PIXELS_PER_TOKEN:
                raise InvalidRequestError(
                    f"must be a positive multiple of {PIXELS_PER_TOKEN} pixels, got {value} "
                    f"(size {self.width}x{self.height})",
                    field=name,
                )

    @property
    def latent_height(self) -> int:
        """Rows of a latent frame, one for 8 rows of pixels."""
        return self.height // SPATIAL_FACTOR

    @property
    def latent_width(self) -> int:
        """Columns of a latent frame, one for 8 columns of pixels."""
        return self.width // SPATIAL_FACTOR

    @property
    def token_rows(self) -> int:
        """Rows of tokens in one latent frame."""
        return self.height // PIXELS_PER_TOKEN

    @property
    def token_columns(self) -> int:
        """Columns of tokens in one latent frame."""
        return self.width // PIXELS_PER_TOKEN

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one latent frame."""
        return self.token_rows * self.token_columns

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def chunk_pixel_frames(chunk_index: int) -> int:
    """Pixel frames that chunk ``chunk_index`` (from 0) adds: 9 for the first, 12 for others."""
    return FIRST_CHUNK_PIXEL_FRAMES if chunk_index == 0 else CHUNK_PIXEL_FRAMES


def chunk_play_ms(fps: float | int) -> float:
    """Milliseconds that a viewer watches a chunk of 12 pixel frames; 750 at the model's 16 fps."""
    return CHUNK_PIXEL_FRAMES / fps * 1000.0


def pixel_frames_of(num_chunks: int) -> int:
    """Pixel frames of a rollout of ``num_chunks`` chunks."""
    return FIRST_CHUNK_PIXEL_FRAMES + (num_chunks - 1) * CHUNK_PIXEL_FRAMES


def chunks_of(pixel_frames: int) -> int:
    """Chunks of a rollout of ``pixel_frames`` pixel frames.

    Raises:
        InvalidRequestError: if the count is not 9 + 12k.
    """
    extra = pixel_frames - FIRST_CHUNK_PIXEL_FRAMES
    if extra < 0 or extra % CHUNK_PIXEL_FRAMES:
        raise InvalidRequestError(
            f"a rollout has {FIRST_CHUNK_PIXEL_FRAMES} + {CHUNK_PIXEL_FRAMES}k pixel frames "
            f"(9, 21, 33, 45, ...), got {pixel_frames}; nearest: {lengths_near(pixel_frames)}",
            field="num_frames",
        )
    return 1 + extra // CHUNK_PIXEL_FRAMES


def nearest_length(pixel_frames: float) -> int:
    """Pixel frames of the rollout whose length is nearest; of two, the longer one."""
    later_chunks = math.floor((pixel_frames - FIRST_CHUNK_PIXEL_FRAMES) / CHUNK_PIXEL_FRAMES + 0.5)
    return pixel_frames_of(1 + max(later_chunks, 0))


def lengths_near(pixel_frames: int) -> str:
    """The rollouts just below and above a count that none has, in words."""
    if pixel_frames < FIRST_CHUNK_PIXEL_FRAMES:
        return f"{FIRST_CHUNK_PIXEL_FRAMES}"
    below = pixel_frames - (pixel_frames - FIRST_CHUNK_PIXEL_FRAMES) % CHUNK_PIXEL_FRAMES
    return f"{below} and {below + CHUNK_PIXEL_FRAMES}"
