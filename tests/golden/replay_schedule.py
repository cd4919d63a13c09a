"""Replays schedules, timestep sinusoids and rotary axes."""

import re
from collections.abc import Iterator, Sequence

import torch

from tests.golden.archive import Archive
from tests.golden.report import Made
from tests.helpers.golden import GoldenSet
from vllm_omni.diffusion.layers.embeddings import timestep_sinusoid
from vllm_omni.diffusion.layers.rope import RotaryEmbeddingWan
from vllm_omni.diffusion.models.lingbot_world.chunk import DmdSchedule

_SHIFT = re.compile(r"shift([\d.]+)\.(timesteps|sigmas)")
_SINUSOID = re.compile(r"sinusoid\.dim(\d+)")
_AXIS = re.compile(r"rope_axis\.start(\d+)\.n(\d+)\.dim(\d+)\.(cos|sin)")
_TIMES = re.compile(r"\(([\d., ]+)\)")


def claim(golden: GoldenSet, names: Sequence[str]) -> list[str]:
    """Names of this family."""
    del golden
    kinds = (_SHIFT, _SINUSOID, _AXIS)
    return [name for name in names if any(kind.fullmatch(name) for kind in kinds)]


def replay(golden: GoldenSet, names: Sequence[str], archive: Archive) -> Iterator[tuple[str, Made]]:
    """Make the named arrays."""
    del archive
    for name in names:
        if match := _SHIFT.fullmatch(name):
            schedule = DmdSchedule.with_shift(float(match[1]))
            values = schedule.sigmas if match[2] == "sigmas" else schedule.timesteps
            yield name, torch.tensor(values, dtype=torch.float64)
        elif match := _SINUSOID.fullmatch(name):
            times = _timesteps(golden.manifest["arrays"][name]["what"])
            yield name, timestep_sinusoid(times, int(match[1]))
        elif match := _AXIS.fullmatch(name):
            start, count, dim = (int(match[part]) for part in (1, 2, 3))
            yield name, _temporal_axis(start, count, dim, match[4])


def _timesteps(text: str) -> torch.Tensor:
    """The timesteps listed in a description; two decimals there stand for the schedule's own."""
    listed = [float(part) for part in _TIMES.search(text)[1].split(",")]
    exact = [time for time in DmdSchedule.with_shift(5.0).timesteps]
    return torch.tensor(
        [next((e for e in exact if round(e, 2) == value), value) for value in listed],
        dtype=torch.float32,
    )


def _temporal_axis(start: int, count: int, dim: int, part: str) -> torch.Tensor:
    """Columns of the temporal axis of the head size whose temporal axis has ``dim`` channels."""
    head_dim = next(
        d for d in range(6, 6 * dim + 6, 2) if RotaryEmbeddingWan(d).axis_dims[0] == dim
    )
    tables = RotaryEmbeddingWan(head_dim).tables(
        start_latent_frame=start,
        latent_frames=count,
        rows=1,
        columns=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return (tables.cos if part == "cos" else tables.sin)[:, : dim // 2]
