"""Replays camera arrays: resampling, rays, folding, keys."""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tests.golden.archive import Archive, first_fact
from tests.golden.report import Made, Skipped
from tests.helpers.golden import GoldenSet
from tests.helpers.rays import path_rays
from vllm_omni.diffusion.camera_motion import integrate_keys, normalise_keys, quaternion_of
from vllm_omni.diffusion.geometry import SPATIAL_FACTOR, VideoGeometry
from vllm_omni.diffusion.models.lingbot_world.camera import (
    RayView,
    fold_camera,
    framewise_deltas,
    interpolate_camera_trajectory,
    reference_intrinsics,
)

_KEYS_PER_CHUNK = 3
_DEFAULT_PATH = "interp.45_to_12"
_DTYPES = {"bf16": torch.bfloat16, "f64": torch.float64, "f16": torch.float16}


def claim(golden: GoldenSet, names: Sequence[str]) -> list[str]:
    """Names of this family, and the facts that go with them."""
    claimed = [name for name in names if any(kind.fullmatch(name) for kind, _ in _MAKERS)]
    if claimed and first_fact(golden.manifest, "reducer") is not None:
        claimed.append("facts.reducer")
    return claimed


def replay(golden: GoldenSet, names: Sequence[str], archive: Archive) -> Iterator[tuple[str, Made]]:
    """Make the named arrays."""
    del archive
    for name in names:
        if name == "facts.reducer":
            yield name, Skipped("log of the tick mode, which is out of scope")
            continue
        kind, maker = next((k, m) for k, m in _MAKERS if k.fullmatch(name))
        yield name, maker(golden, name, kind.fullmatch(name))


def _path(golden: GoldenSet, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Poses and intrinsics that an array was computed from, as its description says."""
    how = golden.manifest["arrays"][name].get("how", "")
    named = re.search(r"(?:interp\.\w+|hard\.\w+|src)", how)
    source = named[0] if named else _DEFAULT_PATH
    return tuple(golden.arrays[f"{source}.{part}"].numpy() for part in ("poses", "intrinsics"))


def _resampled(source: tuple[np.ndarray, np.ndarray], count: int, part: str) -> torch.Tensor:
    poses, intrinsics = interpolate_camera_trajectory(*source, count)
    return torch.from_numpy(poses if part == "poses" else intrinsics)


def _interpolated(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    del name
    count = int(match[1])
    source = (golden.arrays["src.poses"][:count], golden.arrays["src.intrinsics"][:count])
    return _resampled(tuple(array.numpy() for array in source), int(match[2]), match[3])


def _interpolated_hard(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    del name
    source = (golden.arrays[f"{match[1]}.{part}"].numpy() for part in ("poses", "intrinsics"))
    return _resampled(tuple(source), int(match[2]), match[3])


def _quaternions(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    del name
    rotations = golden.arrays[f"{match[1]}.poses"][:, :3, :3].numpy()
    return torch.from_numpy(np.stack([quaternion_of(rotation) for rotation in rotations]))


def _framewise(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    poses, _ = _path(golden, name)
    dtype = golden.arrays[name].dtype
    return framewise_deltas(torch.from_numpy(poses).to(dtype), _scale(match[2]))


def _plucker(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    fields = match.groupdict()
    count = int(fields["frames"])
    if fields["kind"] == "still":
        first = golden.arrays["src.poses"][:1], golden.arrays["src.intrinsics"][:1]
        poses, intrinsics = (array.repeat_interleave(count, dim=0) for array in first)
    else:
        poses, intrinsics = (torch.from_numpy(array)[:count] for array in _path(golden, name))
    # Rays of a size depend on nothing else: those of a target size are its own.
    sizes = {side: int(fields[f"target_{side}"] or fields[side]) for side in ("height", "width")}
    rays = path_rays(
        poses,
        intrinsics,
        **sizes,
        translation_scale=_scale(fields["scale"]),
        dtype=_DTYPES.get(fields["dtype"], torch.float32),
    )
    return fold_camera(rays) if fields["folded"] else rays


def _scale(text: str | None) -> float | None:
    """``unit0p05`` is a divisor of 0.05; ``maxnorm`` or nothing is the longest step."""
    return float(text.removeprefix("unit").replace("p", ".")) if text and "unit" in text else None


def _key_frames(golden: GoldenSet, which: str, count: int) -> list[frozenset[str]]:
    if which == "script":
        return [normalise_keys(keys) for keys in first_fact(golden.manifest, "script")["script"]]
    return [normalise_keys("" if which == "idle" else which)] * count


def _actions(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    frames = _key_frames(golden, match[1], len(golden.arrays[name]))
    return torch.from_numpy(integrate_keys(frames, np.eye(4), 0.0)[0])


def _pitch_per_chunk(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    del name
    frames = _key_frames(golden, match[1], 0)
    pose, pitch, made = np.eye(4), 0.0, []
    for first in range(0, len(frames), _KEYS_PER_CHUNK):
        poses, pitch = integrate_keys(frames[first : first + _KEYS_PER_CHUNK], pose, pitch)
        pose = poses[-1]
        made.append(pitch)
    return torch.tensor(made, dtype=torch.float64)


def _action_intrinsics(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    rows = len(golden.arrays[name])
    row = reference_intrinsics(width=int(match[1]), height=int(match[2]))
    return torch.from_numpy(row).expand(rows, 4)


def _latent_aligned(golden: GoldenSet, name: str, match: re.Match) -> torch.Tensor:
    height, width = (side * SPATIAL_FACTOR for side in golden.arrays[name].shape[-2:])
    view = RayView(VideoGeometry(height, width), torch.float32, torch.device("cpu"))
    poses = golden.arrays["actions.script.poses"][: int(match[1])].numpy()
    return view.fold_after_anchor(np.eye(4), poses, translation_scale=0.05)


_Maker = Callable[[GoldenSet, str, re.Match], torch.Tensor]
_MAKERS: tuple[tuple[re.Pattern, _Maker], ...] = tuple(
    (re.compile(pattern), maker)
    for pattern, maker in (
        (r"interp\.(\d+)_to_(\d+)\.(poses|intrinsics)", _interpolated),
        (r"(.+)\.interp(\d+)\.(poses|intrinsics)", _interpolated_hard),
        (r"(.+)\.quaternions_wxyz", _quaternions),
        (r"framewise\.(\w+)\.(maxnorm|unit\w+)", _framewise),
        (
            r"plucker\.(?P<height>\d+)x(?P<width>\d+)"
            r"(?:_target(?P<target_height>\d+)x(?P<target_width>\d+))?"
            r"\.(?P<kind>f|still)(?P<frames>\d+)(?:\.(?P<scale>unit\w+))?"
            r"(?:\.(?P<dtype>bf16|f64|f16))?(?P<folded>\.folded)?",
            _plucker,
        ),
        (r"actions\.(\w+)\.poses", _actions),
        (r"actions\.(\w+)\.pitch_per_chunk", _pitch_per_chunk),
        (r"actions\.intrinsics\.(\d+)x(\d+)", _action_intrinsics),
        (r"latent_aligned\.first(\d+)\.folded", _latent_aligned),
    )
)
