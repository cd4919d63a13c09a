"""Sink and ring: which slot of a session's window holds which latent frame. Pure arithmetic.

The first ``sink_frames`` frames of a rollout keep their slots for ever; later frames take turns
in the remaining slots, so a new frame always stands where the oldest rolling frame stood.
While the window fills, frame f is in slot f, hence the visible frames are always a prefix of
the slots and the window never needs a mask, a gather or a move.
"""

from dataclasses import dataclass

from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK
from vllm_omni.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Consecutive frames of a chunk that go into consecutive slots.

    Attributes:
        first_frame: index inside the chunk.
        first_slot: slot of that frame.
        count: number of frames.
    """

    first_frame: int
    first_slot: int
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

    def write_runs(self, start: int, count: int) -> tuple[FrameRun, ...]:
        """Say where the frames ``start`` to ``start + count`` go, as at most three runs."""
        runs: list[FrameRun] = []
        for offset in range(count):
            slot = self.slot(start + offset)
            if runs and runs[-1].first_slot + runs[-1].count == slot:
                last = runs.pop()
                runs.append(FrameRun(last.first_frame, last.first_slot, last.count + 1))
            else:
                runs.append(FrameRun(offset, slot, 1))
        return tuple(runs)
