"""Write a chunk's keys and values into the window; attend to all that is visible there."""

from jaxtyping import Float
from torch import Tensor

from vllm_omni.diffusion.attention.backend import AttentionBackend
from vllm_omni.experimental.ar_diffusion.kv_cache.session_kv import (
    ExtentPlan,
    LayerPages,
    WindowPlan,
)


def write_window(
    key: Float[Tensor, "*tokens heads head_dim"],
    value: Float[Tensor, "*tokens heads head_dim"],
    pages: LayerPages,
    plan: WindowPlan,
) -> None:
    """Store the chunk's keys and values where ``plan`` says. Mutates ``pages``.

    A probe and the commit call this alike: what a probe writes, the commit overwrites.

    Args:
        key: of any strides; the leading axes together are the tokens.
        value: the same.
    """
    _write(key, pages.key.flatten(0, 1), plan)
    _write(value, pages.value.flatten(0, 1), plan)


def _write(
    new: Float[Tensor, "*tokens heads head_dim"],
    stored: Float[Tensor, "pool_tokens heads head_dim"],
    plan: WindowPlan,
) -> None:
    if not isinstance(plan, ExtentPlan):
        stored.index_copy_(0, plan.write_index, new.flatten(0, -3))
        return
    for run in plan.write_runs:
        whole = len(plan.write_runs) == 1
        part = slice(run.first, run.first + run.count)
        source = new if whole else new.flatten(0, -3)[part]
        target = stored[run.place : run.place + run.count]
        target.view(source.shape).copy_(source)


def ar_diffusion_paged_attention(
    query: Float[Tensor, "tokens heads head_dim"],
    *,
    pages: LayerPages,
    plan: WindowPlan,
    backend: AttentionBackend,
    scale: float,
) -> Float[Tensor, "tokens heads head_dim"]:
    """One layer's self-attention of one chunk, whose keys and values are in the window."""
    if isinstance(plan, ExtentPlan):
        visible = slice(plan.first_pool_token, plan.first_pool_token + plan.visible_tokens)
        return backend.attend(
            query, pages.key.flatten(0, 1)[visible], pages.value.flatten(0, 1)[visible], scale=scale
        )
    return backend.attend_pages(
        query,
        pages.key,
        pages.value,
        block_table=plan.block_table,
        visible_tokens=plan.visible_tokens,
        scale=scale,
    )
