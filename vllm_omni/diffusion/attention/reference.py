"""Attention written out in float32, and the comparison of every other backend with it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import (
    AttentionBackend,
    Heads,
    Visible,
)
from vllm_omni.errors import ConfigError


class ReferenceAttention(AttentionBackend):
    """Computes scores and softmax in float32 and rounds the weights to the dtype of the values.

    It keeps all scores in memory and is slow.
    """

    name = "reference"

    @override
    def attend(self, query: Heads, key: Visible, value: Visible, *, scale: float) -> Heads:
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
        weights = scores.softmax(dim=-1).to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value)


@dataclass(frozen=True, slots=True)
class _Case:
    """Sizes of one random comparison.

    Attributes:
        page_order: pages of the scattered entry: out of order, and the last one is cut.
    """

    query_tokens: int
    visible_tokens: int
    page_tokens: int
    page_order: tuple[int, ...]


_CASES = (
    _Case(5, 37, page_tokens=16, page_order=(3, 0, 2)),
    # Beyond one tile of a kernel and no multiple of one, as the lengths of the model are.
    _Case(200, 328, page_tokens=128, page_order=(3, 0, 2)),
)
_HEADS = 3
_PEAKED = 4.0
"""Scales the queries so that few keys dominate: an average of all values would be far off."""


def check_attention(
    backend: AttentionBackend, *, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Run random cases through both methods of the backend, once, at start-up.

    Returns:
        The name of the kernel that the backend took.

    Raises:
        ConfigError: if the backend runs no kernel on these tensors, or a result is further from
            the float32 reference than rounding explains.
    """
    kernels = [_check_case(case, backend, head_dim, dtype, device) for case in _CASES]
    return kernels[-1]


def _check_case(
    case: _Case, backend: AttentionBackend, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Float[Tensor, "..."]:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = _PEAKED * draw(case.query_tokens, _HEADS, head_dim)
    shape = (max(case.page_order) + 1, case.page_tokens, _HEADS, head_dim)
    pages = [draw(*shape) for _ in range(2)]
    table = torch.tensor(case.page_order)
    scale = head_dim**-0.5
    key, value = (p[table].flatten(0, 1)[: case.visible_tokens].contiguous() for p in pages)
    wanted = ReferenceAttention().attend(query.float(), key.float(), value.float(), scale=scale)
    try:
        extent = tuple(x.to(device) for x in (query, key, value))
        results = {
            "extent": backend.attend(*extent, scale=scale),
            "pages": backend.attend_pages(
                *(x.to(device) for x in (query, *pages)),
                block_table=table.to(device),
                visible_tokens=case.visible_tokens,
                scale=scale,
            ),
        }
        kernel = backend.kernel(*extent, scale=scale)
        # A kernel that cannot run may say so only when the queue gets to it.
        results = {entry: result.cpu().float() for entry, result in results.items()}
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"attention backend {backend.name} cannot run on {device} with {dtype} and heads of "
            f"{head_dim} channels: {reason}; {_HINT}"
        ) from error
    # A result is an average of values. Rounding each weight, each value and the sum to the dtype
    # moves it by at most 2 eps max|v|; as much again is left for the order of sums. Rounding a
    # score s to float32, on both sides, changes its weight by a factor of up to 1 + eps |s|, and
    # the average by twice that.
    widest = float(value.float().abs().max())
    score = scale * float(torch.einsum("qhd,khd->hqk", query.float(), key.float()).abs().max())
    allowed = (4 * torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * score) * widest
    for entry, result in results.items():
        worst = float((result - wanted).abs().max())
        if not worst <= allowed:
            raise ConfigError(
                f"attention backend {backend.name} is wrong on {device}: its {entry} entry is off "
                f"the float32 reference by {worst:.3g}, rounding to {dtype} allows {allowed:.3g}; "
                f"{_HINT}"
            )
    return kernel


_HINT = "choose another (diffusion_attention_backend), or other versions of the device's libraries"
