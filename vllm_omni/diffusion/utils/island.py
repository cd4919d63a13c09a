"""The place: one fixed island with a few large things on it, and its renderer in numpy.

Ground truth of the toy model. Everything is deterministic, and everything is large: a model of a
million weights keeps large shapes sharp. Coordinates are metres in the camera convention of the
project: +X right, +Y down, +Z forward at heading 0; the eye is at y = 0, the ground at ``EYE``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Float32, UInt8

EYE = 1.6
WALK_RADIUS = 5.0
"""A walker stays within this distance of the middle of the island."""
MARGIN = 1.2
"""A walker stays this far from the surface of every thing, so that none fills the picture."""
PITCH_LIMIT = math.radians(16.0)
"""The neck: the view tilts no further, whatever the camera asks for."""
LIGHTS = ("day", "dusk", "night")
FOCAL_AT_REFERENCE = (500.0 / 832, 500.0 / 480)
"""Focal lengths as shares of width and height: 500 pixels at 832x480, at every size."""
SUPERSAMPLING = 2
BAND_PIXELS = 2**16
"""Most pixels that are painted at once."""

Light = Float[np.ndarray, "3"]
"""Weights of the three lights; they blend linearly."""


def _colours(*rows: tuple[int, int, int]) -> Float32[np.ndarray, "n 3"]:
    return np.array(rows, np.float32) / 255


# One row for each light.
_ZENITH = _colours((84, 146, 226), (92, 70, 140), (18, 26, 66))
_HORIZON = _colours((206, 226, 240), (244, 168, 112), (58, 70, 118))
_SUN = _colours((255, 248, 214), (255, 226, 150), (226, 232, 250))
_SUNLIGHT = np.array([[1.0, 1.0, 1.0], [1.0, 0.74, 0.62], [0.40, 0.47, 0.74]], np.float32)
_SEA = _colours((70, 140, 186), (70, 140, 186), (70, 140, 186))
# Hills change their colour with the heading, a quarter turn each: they tell where one looks.
_HILLS = _colours((128, 92, 168), (206, 142, 84), (84, 146, 96), (92, 120, 180))
_SUN_AZIMUTH, _SUN_ELEVATION = 0.7, 0.3
_GRASS, _SAND, _STONE = _colours((116, 178, 88), (226, 204, 150), (206, 200, 196))
_GRASS_EDGE, _ISLAND_EDGE, _PLAZA = 6.0, 8.2, 1.4


@dataclass(frozen=True, slots=True)
class Thing:
    """A round thing: a column from the ground to ``top``, or a ball whose middle is at ``top``."""

    x: float
    z: float
    radius: float
    top: float
    colour: tuple[int, int, int]
    ball: bool = False
    solid: bool = True


def _at(heading: float, distance: float) -> tuple[float, float]:
    angle = math.radians(heading)
    return distance * math.sin(angle), distance * math.cos(angle)


THINGS = (
    Thing(*_at(15.0, 6.9), 0.85, 4.6, (214, 62, 52)),
    Thing(*_at(75.0, 7.0), 1.3, 2.3, (244, 190, 60)),
    Thing(*_at(130.0, 6.8), 0.7, 3.6, (58, 104, 206)),
    Thing(*_at(190.0, 7.0), 1.5, 2.3, (46, 130, 66), ball=True),
    Thing(*_at(190.0, 7.0), 0.35, 1.6, (110, 74, 48), solid=False),
    Thing(*_at(245.0, 7.2), 1.7, 0.2, (226, 130, 170), ball=True),
    Thing(*_at(305.0, 6.9), 1.0, 3.0, (240, 134, 50)),
    Thing(*_at(50.0, 2.9), 0.45, 2.6, (136, 74, 176)),
    Thing(*_at(225.0, 3.0), 0.65, 0.55, (240, 240, 236), ball=True),
)


@dataclass(frozen=True, slots=True)
class View:
    """Where the eye is and what it looks at: metres and radians."""

    x: float
    z: float
    heading: float
    pitch: float = 0.0


def blocked(x: float, z: float) -> bool:
    """Whether a walker may not stand there."""
    if math.hypot(x, z) > WALK_RADIUS:
        return True
    return any(
        thing.solid and math.hypot(x - thing.x, z - thing.z) < thing.radius + MARGIN
        for thing in THINGS
    )


@lru_cache(maxsize=4)
def _rays(
    height: int, width: int, first_row: int, rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit directions (x, y, z) of a band's supersampled pixels, of a level camera, flat."""
    size = (height * SUPERSAMPLING, width * SUPERSAMPLING)
    first, end = first_row * SUPERSAMPLING, (first_row + rows) * SUPERSAMPLING
    row, column = np.mgrid[first:end, : size[1]].astype(np.float32) + np.float32(0.5)
    x = (column / size[1] - 0.5) / FOCAL_AT_REFERENCE[0]
    y = (row / size[0] - 0.5) / FOCAL_AT_REFERENCE[1]
    length = np.sqrt(x * x + y * y + 1)
    return tuple((part / length).ravel().astype(np.float32) for part in (x, y, np.ones_like(x)))


def render(
    view: View, light: Light, *, height: int = 64, width: int = 96
) -> UInt8[np.ndarray, "height width 3"]:
    """Paint what ``view`` sees, in bands of rows, so that a large picture needs little memory."""
    rows = max(1, BAND_PIXELS // width)
    bands = [
        _render_band(view, light, _rays(height, width, first, min(rows, height - first)), width)
        for first in range(0, height, rows)
    ]
    return np.concatenate(bands)


def _render_band(
    view: View, light: Light, rays: tuple[np.ndarray, np.ndarray, np.ndarray], width: int
) -> UInt8[np.ndarray, "rows width 3"]:
    x, level_y, level_z = rays
    cos, sin = np.float32(math.cos(view.pitch)), np.float32(math.sin(view.pitch))
    y, z = cos * level_y - sin * level_z, sin * level_y + cos * level_z
    # From here on the frame is turned with the heading, so that things turn and rays do not.
    palette = [
        np.asarray(light, np.float32) @ table for table in (_ZENITH, _HORIZON, _SUN, _SUNLIGHT)
    ]
    colour = np.empty((x.size, 3), np.float32)
    up = y <= 1e-3
    colour[up] = _sky(x[up], y[up], z[up], view.heading, palette)
    down = ~up
    depth = np.full(x.size, np.inf, np.float32)
    depth[down] = np.float32(EYE) / y[down]
    colour[down] = _ground(x[down] * depth[down], z[down] * depth[down], view, palette)
    for thing in THINGS:
        _paint_thing(thing, view, (x, y, z), palette, depth, colour)
    fine = np.clip(colour, 0, 1).reshape(-1, SUPERSAMPLING, width, SUPERSAMPLING, 3)
    return np.rint(fine.mean((1, 3)) * 255).astype(np.uint8)


def _sky(
    x: np.ndarray, y: np.ndarray, z: np.ndarray, heading: float, palette: list[np.ndarray]
) -> np.ndarray:
    zenith, horizon, sun, sunlight = palette
    elevation = np.arcsin(-y)
    azimuth = np.arctan2(x, z) + np.float32(heading)
    colour = horizon + (zenith - horizon) * np.sqrt(np.clip(elevation / 0.7, 0, 1))[:, None]
    turn = np.remainder(azimuth - _SUN_AZIMUTH + math.pi, 2 * math.pi) - math.pi
    distance = np.hypot(turn, elevation - np.float32(_SUN_ELEVATION))
    disc = np.clip((0.11 - distance) / 0.03, 0, 1)
    glow = 0.3 * np.exp(-np.square(distance / 0.35))
    colour += (sun - colour) * np.maximum(disc, glow)[:, None]
    quarter = np.remainder(azimuth / (math.pi / 2), 4)
    index = quarter.astype(np.int64) % 4
    share = (quarter - np.floor(quarter))[:, None].astype(np.float32)
    hill = _HILLS[index] * (1 - share) + _HILLS[(index + 1) % 4] * share
    hill = 0.7 * hill * sunlight + 0.3 * horizon
    crest = 0.085 + 0.045 * np.sin(3 * azimuth + 1) + 0.02 * np.sin(7 * azimuth)
    return np.where((elevation < crest)[:, None], hill, colour)


def _ground(x: np.ndarray, z: np.ndarray, view: View, palette: list[np.ndarray]) -> np.ndarray:
    _, horizon, _, sunlight = palette
    cos, sin = np.float32(math.cos(view.heading)), np.float32(math.sin(view.heading))
    east, north = cos * x + sin * z + np.float32(view.x), cos * z - sin * x + np.float32(view.z)
    radius = np.hypot(east, north)
    tile = (np.floor(east / 2.4) + np.floor(north / 2.4)) % 2
    # The lawn's colour tells where one stands: yellower to the east, bluer to the north.
    lean = np.clip(np.stack([east, 0 * east, north], -1) / 40, -0.15, 0.15)
    grass = (_GRASS + lean) * (0.92 + 0.16 * tile)[:, None]
    stone = radius < _PLAZA
    colour = np.where(stone[:, None], _STONE, grass)
    colour = np.where((radius > _GRASS_EDGE)[:, None], _SAND, colour)
    colour = np.where((radius > _ISLAND_EDGE)[:, None], _SEA[0], colour) * sunlight
    away = x * x + z * z
    haze = np.exp(-away / np.float32(22.0**2))[:, None]
    return horizon + (colour - horizon) * haze


def _paint_thing(
    thing: Thing,
    view: View,
    rays: tuple[np.ndarray, np.ndarray, np.ndarray],
    palette: list[np.ndarray],
    depth: np.ndarray,
    colour: np.ndarray,
) -> None:
    """Paint the pixels in which the thing is the nearest so far."""
    east, north = thing.x - view.x, thing.z - view.z
    cos, sin = math.cos(view.heading), math.sin(view.heading)
    cx, cz = np.float32(cos * east - sin * north), np.float32(sin * east + cos * north)
    if cz < -thing.radius:
        return
    cy = np.float32(EYE - thing.top)
    x, y, z = rays
    if thing.ball:
        along = cx * x + cy * y + cz * z
        root = along * along - np.float32(cx * cx + cy * cy + cz * cz - thing.radius**2)
        scale = None
    else:
        scale = x * x + z * z
        along = cx * x + cz * z
        root = along * along - scale * np.float32(cx * cx + cz * cz - thing.radius**2)
    hit = np.flatnonzero((root > 0) & (along > 0))
    if hit.size == 0:
        return
    x, y, z, near = x[hit], y[hit], z[hit], along[hit] - np.sqrt(root[hit])
    if scale is not None:
        near /= scale[hit]
    seen = (near > 0) & (near < depth[hit]) & (near * y < EYE)
    if not thing.ball:
        seen &= near * y > cy
    hit, x, z, near = hit[seen], x[seen], z[seen], near[seen]
    depth[hit] = near
    # The side towards the sun is brighter.
    nx, nz = (near * x - cx) / thing.radius, (near * z - cz) / thing.radius
    sun = _SUN_AZIMUTH - view.heading
    bright = 0.8 + 0.25 * (nx * np.float32(math.sin(sun)) + nz * np.float32(math.cos(sun)))
    paint = np.array(thing.colour, np.float32) / 255 * palette[3]
    colour[hit] = paint * bright[:, None]
