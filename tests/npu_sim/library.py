"""The compiled runtime as Python sees it: queues, order of work, counts of calls."""

import ctypes
from collections import Counter
from collections.abc import Callable
from itertools import count

from tests.npu_sim.build import ALIASES, LIBRARY, built_runtime

RUN_NOW, QUEUE, TAPE = 0, 1, 2
_RUN_ONCE, _DROP = 1, 3
_COUNTERS = (
    "mallocs", "frees", "copies", "records", "waits", "stream_syncs", "event_syncs",
    "device_syncs", "collectives", "replays",
)  # fmt: skip

failures: list[BaseException] = []
"""What pieces of queued work raised; the runtime reports such a failure at the next wait."""

_Kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64)


class Runtime:
    """Queues of the simulated device. Streams are the numbers that torch_npu gives out."""

    def __init__(self) -> None:
        folder = built_runtime()
        self._library = ctypes.CDLL(str(folder / LIBRARY), mode=ctypes.RTLD_GLOBAL)
        for alias in ALIASES:
            ctypes.CDLL(str(folder / alias), mode=ctypes.RTLD_GLOBAL)
        self._library.sim_mode.argtypes = [ctypes.c_void_p]
        self._library.sim_launch.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._library.sim_run_stream.argtypes = [ctypes.c_void_p]
        self._library.sim_pending.restype = ctypes.c_long
        self._work: dict[int, Callable[[], None]] = {}
        self._numbers = count(1)
        self._callback = _Kernel(self._run)
        self._hook = ctypes.c_void_p.in_dll(self._library, "sim_kernel")
        self._hook.value = ctypes.cast(self._callback, ctypes.c_void_p).value

    def forget_python(self) -> None:
        """At interpreter exit: work that is still queued is never run."""
        self._library.sim_stop_watch()
        self._hook.value = None

    def mode(self, stream: int) -> int:
        """What becomes of work given to this stream: one of RUN_NOW, QUEUE, TAPE."""
        return self._library.sim_mode(stream)

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """Give ``work`` to a stream."""
        number = next(self._numbers)
        self._work[number] = work
        self._library.sim_launch(stream, number)

    def set_deferred(self, *, on: bool) -> None:
        """Let streams run as late as they may, or at once."""
        self._library.sim_set_deferred(int(on))

    def run_stream(self, stream: int) -> None:
        """Let one stream get ahead of all others."""
        self._library.sim_run_stream(stream)

    def forgive(self) -> None:
        """Forget that a piece of work has failed."""
        self._library.sim_forgive()

    def pending(self) -> int:
        """Items in all queues."""
        return self._library.sim_pending()

    def counts(self) -> Counter[str]:
        """Calls of the runtime since the process started."""
        values = (ctypes.c_long * len(_COUNTERS)).in_dll(self._library, "sim_counters")
        return Counter(dict(zip(_COUNTERS, values, strict=True)))

    def _run(self, how: int, number: int) -> int:
        if how == _DROP:
            self._work.pop(number, None)
            return 0
        work = self._work.pop(number) if how == _RUN_ONCE else self._work[number]
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - nothing may unwind through C
            failures.append(error)
            return 1
        return 0
