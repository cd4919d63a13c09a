"""Attention written out in float32, and the comparison of every other backend with it."""

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import AttentionBackend, GatheringAttention
from vllm_omni.errors import ConfigError


class ReferenceAttention(GatheringAttention):
    """Computes scores and softmax in float32 and rounds the weights to the dtype of the values.

    It keeps all scores in memory and is slow.
    """

    name = "reference"

    @override
    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
        weights = scores.softmax(dim=-1).to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value)


_QUERY_TOKENS = 5
_VISIBLE_TOKENS = 37
_PAGE_TOKENS = 16
_PAGE_ORDER = (3, 0, 2)
"""Pages of the scattered case: out of order, and the last one is cut."""
_HEADS = 3
_PEAKED = 4.0
"""Scales the queries so that few keys dominate: an average of all values would be far off."""


def check_attention(
    backend: AttentionBackend, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Run a small random case through both methods of the backend, once, at start-up.

    Raises:
        ConfigError: if a result is further from the float32 reference than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Float[Tensor, "..."]:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = _PEAKED * draw(_QUERY_TOKENS, _HEADS, head_dim)
    pages = [draw(max(_PAGE_ORDER) + 1, _PAGE_TOKENS, _HEADS, head_dim) for _ in range(2)]
    table = torch.tensor(_PAGE_ORDER)
    scale = head_dim**-0.5
    key, value = (p[table].flatten(0, 1)[:_VISIBLE_TOKENS].contiguous() for p in pages)
    wanted = ReferenceAttention().attend(query.float(), key.float(), value.float(), scale=scale)
    results = {
        "extent": backend.attend(*(x.to(device) for x in (query, key, value)), scale=scale),
        "pages": backend.attend_pages(
            *(x.to(device) for x in (query, *pages)),
            block_table=table.to(device),
            visible_tokens=_VISIBLE_TOKENS,
            scale=scale,
        ),
    }
    # A result is an average of values. Rounding each weight, each value and the sum to the dtype
    # moves it by at most 2 eps max|v|; as much again is left for the order of sums.
    allowed = 4 * torch.finfo(dtype).eps * float(value.float().abs().max())
    for entry, result in results.items():
        worst = float((result.cpu().float() - wanted).abs().max())
        if not worst <= allowed:
            raise ConfigError(
                f"attention backend {backend.name} is wrong on {device}: its {entry} entry is off "
                f"the float32 reference by {worst:.3g}, rounding to {dtype} allows {allowed:.3g}; "
                "choose another (diffusion_attention_backend), or other versions of the device's "
                "libraries"
            )
