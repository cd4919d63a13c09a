"""The four distilled denoising steps: timesteps and noise levels for a flow shift."""

from dataclasses import dataclass

DMD_LABELS = (1000, 750, 500, 250)
COMMIT_TIMESTEP = 0.0
_TRAIN_STEPS = 1000


@dataclass(frozen=True, slots=True)
class DmdSchedule:
    """Steps warped by ``sigma = s b / ((1 - b) + s b)`` with ``b = label / 1000``.

    Attributes:
        timesteps: what the network is told, ``sigma * 1000``.
        sigmas: share of noise in the input of each step, in double precision.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]

    @classmethod
    def with_shift(cls, flow_shift: float) -> "DmdSchedule":
        """Schedule for one flow shift."""
        sigmas = []
        for label in DMD_LABELS:
            base = label / _TRAIN_STEPS
            numerator = flow_shift * base
            sigmas.append(numerator / ((1.0 - base) + numerator))
        return cls(tuple(sigma * _TRAIN_STEPS for sigma in sigmas), tuple(sigmas))
