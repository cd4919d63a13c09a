"""The conversation with the ranks of one generation, however they are carried."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from jaxtyping import Shaped

from vllm_omni.diffusion.worker.process import Command, Lost, Refused, Reply, Stop, WorkerMain
from vllm_omni.errors import OmniError, WorkerFailedError
from vllm_omni.logger import get_logger

logger = get_logger(__name__)

OBITUARY_S = 0.5
"""How long the others may take to end after the first one has: their end is told too."""
STOP_S = 10.0
"""How long a worker may take to end after it was told to."""


class RankConversation(ABC):
    """A group of ranks: started together, asked and watched together, ended together.

    There are no ranks until :meth:`launch`.

    Nothing of an earlier generation is used again, so a killed rank can have left nothing behind
    that matters. Waiting sleeps in the kernel until a worker speaks or ends.

    One thread converses with the ranks; any thread may end them, also under a conversation, which
    then raises :class:`WorkerFailedError`. What a conversation waits on is closed only after it.

    Attributes:
        refusal: what a rank that ended had refused with, if nobody had read it before.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.refusal: OmniError | None = None
        self._reasons: dict[int, str] = {}
        self._conversing, self._killing = threading.Lock(), threading.Lock()
        self._is_launched = self._is_ended = False

    @abstractmethod
    def launch(self, worker_main: WorkerMain) -> None:
        """Make the ranks. Another thread may end the group meanwhile.

        Args:
            worker_main: what they run.

        Raises:
            WorkerFailedError: if one cannot be made, or the group was ended.
        """

    def send(self, command: Command) -> None:
        """Give every rank a command; raises WorkerFailedError if a rank has ended."""
        with self._conversation():
            for rank in range(self.world_size):
                try:
                    self._send(rank, command)
                except OSError:
                    raise self._loss() from None

    def receive(self, rank: int, *, deadline_s: float, doing: str) -> Reply:
        """Wait for one rank's next reply, with an eye on all ranks.

        Args:
            deadline_s: of ``time.monotonic()``.
            doing: what the worker was asked for, for the error.

        Raises:
            WorkerFailedError: if a rank has ended or the deadline has passed.
        """
        return self.receive_any([rank], deadline_s=deadline_s, doing=doing)[1]

    def receive_any(
        self, ranks: Sequence[int], *, deadline_s: float, doing: str
    ) -> tuple[int, Reply]:
        """Wait for the next reply of any of some ranks, with an eye on all ranks.

        Args:
            ranks: whose replies are wanted, rising; of several that have spoken, the first is read.
            deadline_s: of ``time.monotonic()``.
            doing: what the workers were asked for, for the error.

        Returns:
            The rank that spoke, and what it said.

        Raises:
            WorkerFailedError: if a rank has ended or the deadline has passed.
        """
        with self._conversation():
            try:
                speaker = self._speaker(ranks, deadline_s)
            except TimeoutError:
                noun, silent = "ranks" if len(ranks) > 1 else "rank", ", ".join(map(str, ranks))
                raise WorkerFailedError(
                    f"{noun} {silent} of {self.world_size} did not finish {doing} in time; raise "
                    "chunk_timeout_s or stage_init_timeout if the machine is that slow"
                ) from None
            if speaker is None:
                raise self._loss()
            try:
                reply = self._receive(speaker)
            except (EOFError, OSError):
                raise self._loss() from None
            if isinstance(reply, Lost):
                self._reasons[speaker] = reply.reason
                raise self._loss()
            return speaker, reply

    @abstractmethod
    def read_pixels(
        self, slot: int, shape: tuple[int, ...], dtype: str
    ) -> Shaped[np.ndarray, "..."]:
        """Return the pixels that the root announced last; they stay valid when the group ends.

        Raises:
            WorkerFailedError: if the group was ended.
        """

    def check_alive(self) -> None:
        """Return at once if all ranks run; raises WorkerFailedError if one has ended."""
        with self._conversation():
            if self._await_ends(deadline_s=0.0, enough=1):
                raise self._loss()

    def stop(self) -> None:
        """Let every rank end by itself, then :meth:`kill` what is left.

        A rank that another thread is talking to is not asked: it would not hear it in time.
        """
        if self._conversing.acquire(blocking=False):
            try:
                if self._is_launched and not self._is_ended:
                    self._ask_to_stop()
            finally:
                self._conversing.release()
        self.kill()

    def kill(self) -> None:
        """End every rank at once and give back what the group held; a second call does nothing."""
        with self._killing:
            if self._is_ended:
                return
            self._is_ended = True
            self._kill_ranks()
            # Killing the ranks wakes any thread that waits for them; it releases the lock.
            with self._conversing:
                self._close()

    @abstractmethod
    def _send(self, rank: int, command: Command) -> None:
        """Give one rank a command; an ``OSError`` if that can be seen to be in vain."""

    @abstractmethod
    def _speaker(self, ranks: Sequence[int], deadline_s: float) -> int | None:
        """Wait until one of some ranks has spoken or any rank has ended.

        Returns:
            The first that has spoken; ``None`` if none has.

        Raises:
            TimeoutError: if the deadline has passed.
        """

    @abstractmethod
    def _receive(self, rank: int) -> Reply:
        """Read what a rank has said; ``EOFError`` or ``OSError`` if it has ended instead."""

    @abstractmethod
    def _unread(self, rank: int) -> Iterator[Reply]:
        """What a rank has said and nobody has read."""

    @abstractmethod
    def _await_ends(self, *, deadline_s: float, enough: int) -> bool:
        """Wait until so many ranks have ended, and say whether they have; look once at least."""

    @abstractmethod
    def _ending(self, rank: int) -> str | None:
        """How a rank has ended, as a predicate; ``None`` if it runs."""

    @abstractmethod
    def _kill_ranks(self) -> None:
        """End every rank at once, also under a conversation or a launch."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what the group held of ranks that were killed."""

    def _ask_to_stop(self) -> None:
        for rank in range(self.world_size):
            try:
                self._send(rank, Stop())
            except OSError:
                logger.warning("rank %d had ended before it was told to", rank)
        self._await_ends(deadline_s=time.monotonic() + STOP_S, enough=self.world_size)

    @contextmanager
    def _conversation(self) -> Iterator[None]:
        with self._conversing:
            if self._is_ended:
                raise WorkerFailedError(f"the worker group of {self.world_size} was ended")
            yield

    def _loss(self) -> WorkerFailedError:
        """Return the error that says how every rank fared that has ended or is about to."""
        self._await_ends(deadline_s=time.monotonic() + OBITUARY_S, enough=self.world_size)
        fates = [fate for rank in range(self.world_size) if (fate := self._fate(rank)) is not None]
        return WorkerFailedError(
            f"the worker group of {self.world_size} is lost: {'; '.join(fates) or 'a pipe broke'}"
        )

    def _fate(self, rank: int) -> str | None:
        reason, ending = self._reason(rank), self._ending(rank)
        if ending is None:
            return None if reason is None else f"rank {rank} raised {reason}"
        return f"rank {rank} {ending}" + ("" if reason is None else f" after {reason}")

    def _reason(self, rank: int) -> str | None:
        """Return why a worker ended, if it said so."""
        if rank not in self._reasons:
            said = self._unread(rank)
            match next((reply for reply in said if isinstance(reply, Lost | Refused)), None):
                case Lost(reason):
                    self._reasons[rank] = reason
                case Refused(error) if error is not None and self._ending(rank) is not None:
                    self.refusal = self.refusal or error
                    self._reasons[rank] = f"{type(error).__name__}: {error}"
        return self._reasons.get(rank)
