"""How many bytes a session's KV takes and how many sessions fit. Pure arithmetic."""

from dataclasses import dataclass

from vllm_omni.errors import OutOfKVMemoryError


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the window KV on one rank.

    Attributes:
        num_kv_heads: heads held by this rank for self-attention.
        text_heads: heads held by this rank for cross-attention.
        window_frames: latent frames that a session keeps, sink included.
        element_bytes: size of one key or value element.
        page_tokens: tokens per page.
    """

    num_layers: int
    num_kv_heads: int
    text_heads: int
    head_dim: int
    window_frames: int
    sink_frames: int
    text_tokens: int
    element_bytes: int
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page in all layers."""
        return self.page_tokens * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def text_bytes(self) -> int:
        """Bytes of the keys and values of a prompt in all layers."""
        width = self.text_heads * self.head_dim * self.element_bytes
        return 2 * self.num_layers * self.text_tokens * width

    def window_tokens(self, tokens_per_frame: int) -> int:
        """Number of tokens that the window of one session holds."""
        return self.window_frames * tokens_per_frame

    def window_pages(self, tokens_per_frame: int) -> int:
        """Number of pages that the window of one session takes."""
        return -(-self.window_tokens(tokens_per_frame) // self.page_tokens)


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """The size of the KV pool that fits into memory.

    Attributes:
        num_pages: pages of the pool.
        sessions: sessions of the configured size that it admits.
        raised: whether the configured share had to be exceeded to admit one session.
    """

    num_pages: int
    sessions: int
    raised: bool


def plan_pool(
    spec: KVCacheSpec,
    *,
    tokens_per_frame: int,
    max_sessions: int,
    other_bytes_per_session: int,
    workspace_bytes: int,
    free_bytes: int,
    fraction: float | None,
) -> PoolBudget:
    """Size the pool for sessions of one geometry.

    Args:
        other_bytes_per_session: what a session holds beside its window: text KV, decoder and
            encoder history.
        workspace_bytes: what the chunk being made holds, whichever session's it is.
        fraction: share of what the workspace leaves of ``free_bytes``, for all sessions;
            ``None`` takes what ``max_sessions`` sessions need.

    Raises:
        OutOfKVMemoryError: if not even one session and the workspace fit into ``free_bytes``.
    """
    window_pages = spec.window_pages(tokens_per_frame)
    session_bytes = window_pages * spec.page_bytes + other_bytes_per_session
    usable_bytes = free_bytes - workspace_bytes
    if session_bytes > usable_bytes:
        raise OutOfKVMemoryError(
            f"one session needs {session_bytes} bytes ({window_pages} KV pages of "
            f"{spec.page_bytes} bytes and {other_bytes_per_session} bytes of state) and the chunk "
            f"being made {workspace_bytes}, {free_bytes} bytes are free; lower the size or use "
            "more ranks (ulysses_degree)"
        )
    if fraction is None:
        sessions = min(max_sessions, usable_bytes // session_bytes)
        return PoolBudget(sessions * window_pages, sessions, raised=False)
    share = int(usable_bytes * fraction)
    sessions = max(1, min(max_sessions, share // session_bytes))
    return PoolBudget(sessions * window_pages, sessions, raised=share < session_bytes)
