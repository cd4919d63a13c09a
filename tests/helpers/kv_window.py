"""What a session's KV window holds, in the order of frames."""

import torch
from jaxtyping import Float
from torch import Tensor

from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import SessionKV
from vllm_omni.experimental.ar_diffusion.kv_cache.window import WindowLayout


def resident_frames(layout: WindowLayout, next_frame: int) -> tuple[int, ...]:
    """Slots of the first ``next_frame`` frames that are still held, the oldest frame first."""
    first_rolling = max(layout.sink_frames, next_frame - layout.ring_frames)
    frames = (*range(min(layout.sink_frames, next_frame)), *range(first_rolling, next_frame))
    return tuple(layout.slot(frame) for frame in frames)


def chronological(
    kv: SessionKV, layer: int, next_frame: int
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float[Tensor, "tokens heads head_dim"]]:
    """Copies of the committed keys and values of a layer, oldest frame first."""
    size, page_tokens = kv.tokens_per_frame, kv.pool.spec.page_tokens
    slots = torch.tensor(resident_frames(kv.layout, next_frame))
    tokens = (slots[:, None] * size + torch.arange(size)).flatten()
    index = torch.tensor(kv.allocation.pages)[tokens // page_tokens] * page_tokens
    index = (index + tokens % page_tokens).to(kv.pool.device)
    pages = kv.pool.layers[layer]
    return pages.key.flatten(0, 1)[index], pages.value.flatten(0, 1)[index]
