"""The key and value tensors of all sessions, and one session's view of them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vllm_omni.errors import OutOfKVMemoryError, SessionClosedError
from vllm_omni.experimental.ar_diffusion.kv_cache.window import KVCacheSpec, Run, WindowLayout


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """Where one chunk writes and reads when the session's pages stand in a row."""

    write_runs: tuple[Run, ...]
    first_pool_token: int
    visible_tokens: int


@dataclass(frozen=True, slots=True)
class ScatteredPlan:
    """Where one chunk writes and reads when the session's pages do not stand in a row."""

    write_index: Int[Tensor, " tokens"]
    block_table: Int[Tensor, " window_pages"]
    visible_tokens: int


WindowPlan = ExtentPlan | ScatteredPlan


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys and values of one layer, as pages of tokens."""

    key: Float[Tensor, "pages page_tokens heads head_dim"]
    value: Float[Tensor, "pages page_tokens heads head_dim"]


class KVPool:
    """Pages of keys and values, one pair of tensors per layer."""

    def __init__(
        self, spec: KVCacheSpec, num_pages: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.pages = PagePool(num_pages)
        shape = (num_pages, spec.page_tokens, spec.num_kv_heads, spec.head_dim)
        self.layers = tuple(
            LayerPages(
                key=torch.zeros(shape, dtype=dtype, device=device),
                value=torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(spec.num_layers)
        )
        self.device = device

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages of all layers."""
        return self.pages.num_pages * self.spec.page_bytes


class SessionKV:
    """The window of one session: a ring over its pages.

    Args:
        pool: where the pages come from.
        tokens_per_frame: tokens of one latent frame of this session's size.

    Raises:
        OutOfKVMemoryError: if the pool has too few free pages.
    """

    def __init__(self, pool: KVPool, tokens_per_frame: int) -> None:
        spec = pool.spec
        self.pool = pool
        self.tokens_per_frame = tokens_per_frame
        self.layout = WindowLayout(spec.window_frames, spec.sink_frames)
        self.allocation = pool.pages.allocate(spec.window_pages(tokens_per_frame))
        self.closed = False

    def plan(self, start_latent_frame: int, latent_frames: int) -> WindowPlan:
        """Say where a chunk that starts at ``start_latent_frame`` writes and what it sees.

        The frames it overwrites are out of its sight, so probes and commit use the same plan.
        """
        if self.closed:
            raise SessionClosedError("the KV window of this session was given back")
        size = self.tokens_per_frame
        visible = self.layout.visible_frames(start_latent_frame, latent_frames) * size
        runs = tuple(
            Run(run.first * size, run.place * size, run.count * size)
            for run in self.layout.write_runs(start_latent_frame, latent_frames)
        )
        if self.allocation.is_extent:
            first = self.allocation.pages[0] * self.pool.spec.page_tokens
            placed = tuple(Run(run.first, first + run.place, run.count) for run in runs)
            return ExtentPlan(placed, first, visible)
        return self._scattered_plan(runs, visible)

    def _scattered_plan(self, runs: tuple[Run, ...], visible: int) -> ScatteredPlan:
        page_tokens = self.pool.spec.page_tokens
        table = torch.tensor(self.allocation.pages)
        window_tokens = torch.cat([torch.arange(run.place, run.place + run.count) for run in runs])
        index = table[window_tokens // page_tokens] * page_tokens + window_tokens % page_tokens
        return ScatteredPlan(index.to(self.pool.device), table.to(self.pool.device), visible)

    def close(self) -> None:
        """Give the pages back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.pool.pages.free(self.allocation)


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """The pages that one session holds, in ascending order."""

    pages: tuple[int, ...]

    @property
    def is_extent(self) -> bool:
        """Whether the pages stand one after the other."""
        return self.pages[-1] - self.pages[0] + 1 == len(self.pages)


class PagePool:
    """Hands out pages ``0 .. num_pages - 1``, extents first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Number of pages that no session holds."""
        return self.num_pages - sum(self._taken)

    def allocate(self, count: int) -> PageAllocation:
        """Take ``count`` pages: the first free extent that fits, else the lowest free pages.

        Raises:
            OutOfKVMemoryError: if fewer than ``count`` pages are free.
        """
        if count > self.num_free:
            raise OutOfKVMemoryError(
                f"a session needs {count} KV pages, {self.num_free} of {self.num_pages} are free; "
                "close a session, lower the size, or raise max_num_seqs or gpu_memory_fraction"
            )
        start = self._taken.find(bytes(count))
        if start >= 0:
            pages = tuple(range(start, start + count))
        else:
            free = (page for page, taken in enumerate(self._taken) if not taken)
            pages = tuple(page for page, _ in zip(free, range(count), strict=False))
        for page in pages:
            self._taken[page] = 1
        return PageAllocation(pages)

    def free(self, allocation: PageAllocation) -> None:
        """Take pages back from a session, so that others can get them.

        Raises:
            ValueError: if a page is not held, which means it was freed twice.
        """
        for page in allocation.pages:
            if not self._taken[page]:
                raise ValueError(f"KV page {page} was freed twice")
            self._taken[page] = 0
