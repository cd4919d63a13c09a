"""What an attention backend does; one object per process, chosen by name at start-up."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class AttentionBackend(Protocol):
    """Unmasked softmax attention of a chunk's queries over all visible keys.

    The order of keys is of no concern to a backend. No argument needs a read-back from the
    device: lengths are host integers and follow from shapes.
    """

    name: str

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend to keys and values that stand one after the other in memory."""
        ...

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
        """Attend to the first ``visible_tokens`` tokens of the pages named by ``block_table``."""
        ...


def gather_pages(
    pages: Float[Tensor, "pages page_tokens heads head_dim"],
    block_table: Int[Tensor, " window_pages"],
    visible_tokens: int,
) -> Float[Tensor, "visible heads head_dim"]:
    """Copy whole pages in table order and cut the tail of the last one."""
    needed = -(-visible_tokens // pages.shape[1])
    return pages.index_select(0, block_table[:needed]).flatten(0, 1)[:visible_tokens]


class GatheringAttention:
    """Base of the backends that know nothing of pages: they get a contiguous copy."""

    def attend(
        self,
        query: Float[Tensor, "tokens heads head_dim"],
        key: Float[Tensor, "visible heads head_dim"],
        value: Float[Tensor, "visible heads head_dim"],
        *,
        scale: float,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend to keys and values that stand one after the other in memory."""
        raise NotImplementedError

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
        """Gather whole pages, then attend."""
        key = gather_pages(key_pages, block_table, visible_tokens)
        value = gather_pages(value_pages, block_table, visible_tokens)
        return self.attend(query, key, value, scale=scale)
