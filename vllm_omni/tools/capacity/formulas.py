"""Formulas of a capacity plan; all of them are held to :mod:`simulation` or to counted figures."""

from math import floor

from vllm_omni.diffusion.geometry import CHUNK_PIXEL_FRAMES


def play_ms(fps: float) -> float:
    """Return how long a viewer watches one chunk, in milliseconds; 750 at the model's 16 fps."""
    return CHUNK_PIXEL_FRAMES / fps * 1000.0


def sessions_per_group(chunk_ms: float, fps: float) -> int:
    """Return how many worlds one worker group makes in time.

    They take turns, chunk by chunk, so this is a step function: a group whose chunk takes 0.75 of
    the time in which it is played makes one world, like a group that needs all of that time.
    """
    return floor(play_ms(fps) / chunk_ms + 1e-9)


def waiting_share(places: int, load: float) -> float:
    """Return the share of newcomers who find no free place: Erlang's formula C.

    Args:
        places: served at once by one line; must be above the load, else everybody waits.
        load: sessions that would run at once if there were places without end, on average
            (arrivals a second x mean stay).
    """
    if places <= load:
        return 1.0
    blocked = 1.0
    for place in range(1, places + 1):
        blocked = _with_one_more(blocked, place, load)
    return _waiting(blocked, places, load)


def places_for(load: float, target: float) -> int:
    """Return the fewest places behind one line at which at most a share ``target`` waits."""
    places, blocked, waiting = 0, 1.0, 1.0
    while waiting > target:
        places += 1
        blocked = _with_one_more(blocked, places, load)
        waiting = _waiting(blocked, places, load) if places > load else 1.0
    return places


def mean_wait_s(places: int, load: float, stay_s: float) -> float:
    """Return the mean wait of all newcomers in seconds, if nobody gives up waiting."""
    return waiting_share(places, load) * stay_s / (places - load)


def _with_one_more(blocked: float, places: int, load: float) -> float:
    """Erlang's formula B by its recursion: the share that is refused where nobody can wait."""
    return load * blocked / (places + load * blocked)


def _waiting(blocked: float, places: int, load: float) -> float:
    return blocked / (1.0 - (load / places) * (1.0 - blocked))
