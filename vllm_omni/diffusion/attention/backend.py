"""Attention backends: what each of them computes, and how one is made.

A worker chooses one by name when it starts. To add one, write a file beside this one and add a
line to :data:`vllm_omni.diffusion.data.ATTENTION_BACKENDS`.
"""

from importlib import import_module

from jaxtyping import Float, Int
from torch import Tensor

from vllm_omni.diffusion.data import ATTENTION_BACKENDS
from vllm_omni.errors import ConfigError
from vllm_omni.wording import one_of

Heads = Float[Tensor, "tokens heads head_dim"]
"""Queries or keys of a chunk, or what attention makes of them."""
Visible = Float[Tensor, "visible heads head_dim"]
"""Keys or values that a chunk sees."""
Pages = Float[Tensor, "pages page_tokens heads head_dim"]
"""Keys or values of the pool."""
PageIds = Int[Tensor, " window_pages"]


class AttentionBackend:
    """Unmasked softmax attention of a chunk's queries over all visible keys.

    The result must not depend on the order of the keys. All lengths are host integers, so that no
    backend has to read a value back from the device.
    """

    name: str

    def attend(self, query: Heads, key: Visible, value: Visible, *, scale: float) -> Heads:
        """Attend to keys and values that are contiguous in memory."""
        raise NotImplementedError

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
        """Attend to the first ``visible_tokens`` tokens of the pages named by ``block_table``.

        A backend that cannot read pages attends to a contiguous copy of them.
        """
        key = gather_pages(key_pages, block_table, visible_tokens)
        value = gather_pages(value_pages, block_table, visible_tokens)
        return self.attend(query, key, value, scale=scale)

    def kernel(self, *operands: Float[Tensor, "_ heads head_dim"], scale: float) -> str:
        """Name the kernel that :meth:`attend` runs on this query, key and value."""
        del operands, scale  # a backend has one kernel, unless it says otherwise
        return self.name


def gather_pages(pages: Pages, block_table: PageIds, visible_tokens: int) -> Visible:
    """Copy whole pages in table order and cut the tail of the last one."""
    needed = -(-visible_tokens // pages.shape[1])
    return pages.index_select(0, block_table[:needed]).flatten(0, 1)[:visible_tokens]


def create_attention_backend(name: str) -> AttentionBackend:
    """Import and make the backend called ``name``.

    Raises:
        ConfigError: if there is no such backend.
    """
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"attention backend must be {one_of(ATTENTION_BACKENDS)}, got {name!r} "
            "(diffusion_attention_backend)"
        )
    module, _, attribute = ATTENTION_BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)()
