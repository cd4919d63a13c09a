"""Attention by torch's scaled_dot_product_attention, on CPU and CUDA."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vllm_omni.diffusion.attention.backend import gather_pages


class SdpaAttention:
    """Views in, fused kernel, view out; nothing is copied for an extent."""

    name = "sdpa"

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend with heads as the batch axis of the kernel."""
        attended = F.scaled_dot_product_attention(
            _heads_first(query), _heads_first(key), _heads_first(value), scale=scale
        )
        return attended[0].transpose(0, 1)

    def attend_pages(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key_pages: Float[Tensor, "pages page_tokens heads head_dim"],
        value_pages: Float[Tensor, "pages page_tokens heads head_dim"],
        *,
        block_table: Int[Tensor, " window_pages"],
        visible_tokens: int,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Gather, then attend."""
        key = gather_pages(key_pages, block_table, visible_tokens)
        value = gather_pages(value_pages, block_table, visible_tokens)
        return self.attend(query, key, value, scale=scale)


def _heads_first(
    x: Float[Tensor, "tokens heads head_dim"],
) -> Float[Tensor, "1 heads tokens head_dim"]:
    return x.transpose(0, 1).unsqueeze(0)
