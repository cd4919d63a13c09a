"""Attention by the fused operator of Ascend NPUs.

A chunk sees all of its window, so there is no mask. The operator's default scale is 1 and it does
not check its layouts, so both are always given.
"""

import torch
from typing_extensions import override

from vllm_omni.diffusion.attention.backend import (
    AttentionBackend,
    Heads,
    PageIds,
    Pages,
    Visible,
    gather_pages,
)
from vllm_omni.errors import ConfigError
from vllm_omni.platforms.npu import load_torch_npu

_DTYPES = (torch.float16, torch.bfloat16)


class NpuFusionAttention(AttentionBackend):
    """Runs the operator on views of the pool and reads nothing back to the host."""

    name = "npu_fusion"

    def __init__(self) -> None:
        self._torch_npu = load_torch_npu()

    @override
    def attend(self, query: Heads, key: Visible, value: Visible, *, scale: float) -> Heads:
        """Use the layout (batch, sequence, heads, dim), which needs no lengths."""
        _check_dtype(query.dtype)
        batched = (x.contiguous().unsqueeze(0) for x in (query, key, value))
        output = self._torch_npu.npu_fusion_attention(*batched, query.shape[1], "BSND", scale=scale)
        return output[0].squeeze(0)

    @override
    def attend_pages(
        self,
        query: Heads,
        key_pages: Pages,
        value_pages: Pages,
        *,
        block_table: PageIds,
        visible_tokens: int,
        scale: float,
    ) -> Heads:
        """Gather whole pages, then use the packed layout (all tokens, heads, dim).

        Its lengths are the ends of the sequences, counted from the start of the first one. They
        are host integers, since a device tensor would be read back before every call.
        """
        _check_dtype(query.dtype)
        output = self._torch_npu.npu_fusion_attention(
            query.contiguous(),
            gather_pages(key_pages, block_table, visible_tokens),
            gather_pages(value_pages, block_table, visible_tokens),
            query.shape[1],
            "TND",
            scale=scale,
            actual_seq_qlen=cumulative_ends([query.shape[0]]),
            actual_seq_kvlen=cumulative_ends([visible_tokens]),
        )
        return output[0]


def cumulative_ends(lengths: list[int]) -> list[int]:
    """Turn lengths of consecutive sequences into their ends: ``[2, 2, 2]`` into ``[2, 4, 6]``."""
    return [sum(lengths[: index + 1]) for index in range(len(lengths))]


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(
            f"the attention of Ascend NPUs takes float16 and bfloat16, got {dtype}; set dtype: "
            "bfloat16"
        )
