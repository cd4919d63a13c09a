"""Page ids and who holds them. No tensors.

A session takes all its pages at once and gives them back at once, so a contiguous extent is
nearly always free; when none is, scattered pages are handed out.
"""

from dataclasses import dataclass

from vllm_omni.errors import OutOfKVMemoryError


@dataclass(frozen=True, slots=True)
class PageAllocation:
    """Pages of one session, ascending."""

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
        """Pages that nobody holds."""
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
        """Give pages back.

        Raises:
            ValueError: if a page is not held, which means it was freed twice.
        """
        for page in allocation.pages:
            if not self._taken[page]:
                raise ValueError(f"KV page {page} was freed twice")
            self._taken[page] = 0
