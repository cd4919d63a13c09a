"""Writes the keys and values of a chunk into the window, then attends to all visible tokens."""

from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import (
    ExtentPlan,
    LayerPages,
    WindowPlan,
)


def write_window(
    key: Float[Tensor, "tokens heads head_dim"],
    value: Float[Tensor, "tokens heads head_dim"],
    pages: LayerPages,
    plan: WindowPlan,
) -> None:
    """Store the keys and values of a chunk at the places of ``plan``. Mutates ``pages``."""
    key_tokens, value_tokens = pages.key.flatten(0, 1), pages.value.flatten(0, 1)
    if not isinstance(plan, ExtentPlan):
        key_tokens.index_copy_(0, plan.write_index, key)
        value_tokens.index_copy_(0, plan.write_index, value)
        return
    for run in plan.write_runs:
        source = slice(run.first_token, run.first_token + run.count)
        target = slice(run.first_pool_token, run.first_pool_token + run.count)
        key_tokens[target] = key[source]
        value_tokens[target] = value[source]


def ar_diffusion_paged_attention(
    query: Float[Tensor, "tokens heads head_dim"],
    key: Float[Tensor, "tokens heads head_dim"],
    value: Float[Tensor, "tokens heads head_dim"],
    *,
    pages: LayerPages,
    plan: WindowPlan,
    backend: AttentionBackend,
    scale: float,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Compute the self-attention of one layer for one chunk. Mutates ``pages``.

    Denoising steps and the commit call this alike; each overwrites what the last one has written.
    """
    write_window(key, value, pages, plan)
    if isinstance(plan, ExtentPlan):
        visible = slice(plan.first_pool_token, plan.first_pool_token + plan.visible_tokens)
        return backend.attend(
            query,
            pages.key.flatten(0, 1)[visible],
            pages.value.flatten(0, 1)[visible],
            scale=scale,
        )
    return backend.attend_pages(
        query,
        pages.key,
        pages.value,
        block_table=plan.block_table,
        visible_tokens=plan.visible_tokens,
        scale=scale,
    )
