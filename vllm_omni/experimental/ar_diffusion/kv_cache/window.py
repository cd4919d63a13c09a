"""The window of a session: which slot holds which latent frame, how many bytes that takes, and how
many sessions fit. Pure arithmetic.

The first ``sink_frames`` frames of a rollout keep their slots for ever; later frames take turns
in the remaining slots, so a new frame always stands where the oldest rolling frame stood.
While the window fills, frame f is in slot f, hence the visible frames are always a prefix of
the slots and the window never needs a mask, a gather or a move.
"""

from dataclasses import dataclass

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.errors import ConfigError, OutOfKVMemoryError


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive frames of a chunk that go into consecutive slots, or their tokens.

    Attributes:
        first: index inside the chunk.
        place: where that frame or token goes, in the window or in the pool.
        count: number of frames or tokens.
    """

    first: int
    place: int
    count: int


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """A window of ``window_frames`` latent frames of which the first ``sink_frames`` stay.

    Raises:
        ConfigError: if the rolling part cannot hold one chunk.
    """

    window_frames: int
    sink_frames: int

    def __post_init__(self) -> None:
        if self.sink_frames < 0 or self.ring_frames < LATENT_FRAMES_PER_CHUNK:
            raise ConfigError(
                f"a window of {self.window_frames} latent frames with a sink of "
                f"{self.sink_frames} leaves {self.ring_frames} rolling frames; at least "
                f"{LATENT_FRAMES_PER_CHUNK} are needed (sliding_window_num_frames or "
                "local_attn_size, and sink_size)"
            )

    @property
    def ring_frames(self) -> int:
        """Number of slots behind the sink, which are overwritten in turn."""
        return self.window_frames - self.sink_frames

    def slot(self, latent_frame: int) -> int:
        """Return the slot of a latent frame, counted from the start of the rollout."""
        if latent_frame < self.sink_frames:
            return latent_frame
        return self.sink_frames + (latent_frame - self.sink_frames) % self.ring_frames

    def visible_frames(self, start: int, count: int) -> int:
        """Count the frames that a chunk at ``start`` sees, itself included: the first slots."""
        return min(start + count, self.window_frames)

    def write_runs(self, start: int, count: int) -> tuple[Run, ...]:
        """Say where the frames ``start`` to ``start + count`` go, as at most three runs."""
        runs: list[Run] = []
        for offset in range(count):
            slot = self.slot(start + offset)
            if runs and runs[-1].place + runs[-1].count == slot:
                last = runs.pop()
                runs.append(Run(last.first, last.place, last.count + 1))
            else:
                runs.append(Run(offset, slot, 1))
        return tuple(runs)


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


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What one session of one size needs on one rank, in bytes.

    Attributes:
        state: what it holds beside its window: text KV, decoder and encoder history.
        workspace: what the chunk being made holds, whichever session's it is.
        activations: what single layers take at most while they work, once for all sessions.
    """

    window: int
    state: int
    workspace: int
    activations: int

    @property
    def session(self) -> int:
        """What every further session adds."""
        return self.window + self.state

    @property
    def shared(self) -> int:
        """What is needed once, however many sessions there are."""
        return self.workspace + self.activations

    @property
    def total(self) -> int:
        """What the first session needs."""
        return self.session + self.shared

    def __str__(self) -> str:
        return (
            f"{in_gib(self.total)} GiB (KV window {in_gib(self.window)}, prompt and VAE histories "
            f"{in_gib(self.state)}, the chunk being made {in_gib(self.workspace)}, activations "
            f"{in_gib(self.activations)})"
        )


def in_gib(num_bytes: int) -> str:
    """A number of bytes in GiB, with as many digits as small models need."""
    gib = num_bytes / 2**30
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.2g}"


def plan_pool(
    needs: MemoryNeeds,
    *,
    window_pages: int,
    max_sessions: int,
    free_bytes: int,
    fraction: float | None,
) -> PoolBudget:
    """Size the pool for sessions of one geometry.

    Args:
        window_pages: pages of one session's window.
        fraction: share of what is left of ``free_bytes`` beside what is needed once, for all
            sessions; ``None`` takes what ``max_sessions`` sessions need.

    Raises:
        OutOfKVMemoryError: if not even one session fits into ``free_bytes``.
    """
    usable_bytes = free_bytes - needs.shared
    if needs.session > usable_bytes:
        raise OutOfKVMemoryError(f"one world needs {needs}, {in_gib(free_bytes)} GiB are free")
    if fraction is None:
        sessions = min(max_sessions, usable_bytes // needs.session)
        return PoolBudget(sessions * window_pages, sessions, raised=False)
    share = int(usable_bytes * fraction)
    sessions = max(1, min(max_sessions, share // needs.session))
    return PoolBudget(sessions * window_pages, sessions, raised=share < needs.session)
