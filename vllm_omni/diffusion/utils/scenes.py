"""Three first-frame pictures, drawn by the program, so that nothing is downloaded for a demo.

Shapes are given in fractions of the picture and drawn at a multiple of the size, then reduced, so
that every size shows the same scene with smooth edges. The result depends on the size alone.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw

from vllm_omni.errors import ConfigError

Number = float | int
Point = tuple[Number, Number]
Colour = tuple[int, int, int]

_OVERSAMPLING = 4


class _Canvas:
    """A picture addressed in fractions: (0, 0) is the top left corner, (1, 1) the bottom right."""

    def __init__(self, height: int, width: int) -> None:
        self.size = (width * _OVERSAMPLING, height * _OVERSAMPLING)
        self.picture = Image.new("RGB", self.size)
        self._pen = ImageDraw.Draw(self.picture)

    def gradient(self, top: Number, bottom: Number, stops: Sequence[Colour]) -> None:
        """Fill a band over the whole width with colours that run from top to bottom."""
        first, last = round(top * self.size[1]), round(bottom * self.size[1])
        position = np.linspace(0, len(stops) - 1, max(last - first, 1))
        channels = [
            np.interp(position, range(len(stops)), channel) for channel in np.transpose(stops)
        ]
        column = np.stack(channels, axis=-1).round().astype(np.uint8)[:, None]
        band = np.broadcast_to(column, (column.shape[0], self.size[0], 3))
        self.picture.paste(Image.fromarray(np.ascontiguousarray(band)), (0, first))

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        """Fill a polygon whose corners are fractions of width and height."""
        self._pen.polygon([self._pixel(point) for point in points], fill=colour)

    def disc(self, centre: Point, radius: Number, colour: Colour) -> None:
        """Fill a circle; the radius is a fraction of the height."""
        x, y = self._pixel(centre)
        reach = radius * self.size[1]
        self._pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=colour)

    def glow(self, centre: Point, radius: Number, colour: Colour) -> None:
        """Add light that fades with the square of the distance."""
        columns, rows = self.size
        y, x = np.mgrid[0:rows, 0:columns].astype(np.float32) / rows
        distance = np.hypot(x - centre[0] * columns / rows, y - centre[1]) / radius
        self._lighten(np.exp(-(distance**2)), colour)

    def finish(self) -> Image.Image:
        """Reduce to the size that was asked for."""
        return self.picture.reduce(_OVERSAMPLING)

    def _lighten(self, strength: Float[np.ndarray, "rows columns"], colour: Colour) -> None:
        light = strength[..., None] * np.array(colour, np.float32)
        lit = np.clip(np.asarray(self.picture, np.float32) + light, 0, 255).astype(np.uint8)
        self.picture.paste(Image.fromarray(lit))

    def _pixel(self, point: Point) -> Point:
        return point[0] * self.size[0], point[1] * self.size[1]


def draw_scene(name: str, *, height: int, width: int) -> Image.Image:
    """Draw a scene of :data:`SCENES` as an RGB picture.

    Raises:
        ConfigError: for an unknown name or an empty size.
    """
    if name not in SCENES:
        raise ConfigError(f"no scene {name!r}; choose {', '.join(SCENES)}")
    if height < 1 or width < 1:
        raise ConfigError(f"a picture needs positive sides, got {width}x{height}")
    canvas = _Canvas(height, width)
    SCENES[name](canvas)
    return canvas.finish()


def _mix(near: Colour, far: Colour, share: Number) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(near, far, strict=True))
    return red, green, blue


def _ridge(canvas: _Canvas, base: Number, height: Number, waves: Point, colour: Colour) -> None:
    """A hilly silhouette that ends at ``base``; ``waves`` are two frequencies."""
    x = np.linspace(0, 1, 97)
    crest = 0.5 + 0.3 * np.sin(waves[0] * x + waves[1]) + 0.2 * np.sin(waves[1] * x + waves[0])
    outline = [(float(a), float(base - height * b)) for a, b in zip(x, crest, strict=True)]
    canvas.polygon([*outline, (1, base), (0, base)], colour)


def _road(canvas: _Canvas) -> None:
    """A straight road to the horizon under an evening sky."""
    horizon, vanishing = 0.52, (0.5, 0.52)
    canvas.gradient(0, horizon, [(38, 62, 120), (112, 130, 186), (244, 176, 130), (255, 214, 150)])
    canvas.glow((0.62, 0.49), 0.22, (90, 60, 10))
    canvas.disc((0.62, 0.48), 0.045, (255, 240, 205))
    _ridge(canvas, horizon, 0.16, (9.0, 17.0), (104, 92, 128))
    _ridge(canvas, horizon, 0.09, (13.0, 5.0), (72, 74, 92))
    canvas.gradient(horizon, 1, [(150, 148, 84), (92, 122, 52), (44, 78, 30)])
    canvas.polygon([vanishing, (1.02, 1), (-0.02, 1)], (70, 70, 76))
    for side in (-1, 1):
        edge = 0.5 + side * 0.47
        canvas.polygon([vanishing, (edge, 1), (edge - side * 0.03, 1)], (222, 218, 206))
    for near in (1.0, 0.62, 0.4, 0.27, 0.19):  # depth halves the gap between dashes
        far = near * 0.78
        top, bottom = horizon + 0.48 * far, horizon + 0.48 * near
        canvas.polygon(
            [(0.5 - 0.016 * near, bottom), (0.5 + 0.016 * near, bottom),
             (0.5 + 0.016 * far, top), (0.5 - 0.016 * far, top)],
            (240, 206, 90),
        )  # fmt: skip
    for near in (0.1, 0.16, 0.26, 0.45, 0.8):
        for side in (-1, 1):
            _tree(canvas, 0.5 + side * 0.78 * near, horizon + 0.36 * near, near)


def _tree(canvas: _Canvas, x: Number, ground: Number, near: Number) -> None:
    trunk, height = 0.012 * near, 0.62 * near
    leaf = _mix((34, 66, 40), (96, 96, 104), 1 - near)
    canvas.polygon(
        [(x - trunk, ground), (x + trunk, ground), (x + trunk, ground - height / 2),
         (x - trunk, ground - height / 2)],
        (62, 46, 36),
    )  # fmt: skip
    for part, size in ((0.45, 0.2), (0.65, 0.17), (0.83, 0.12)):
        canvas.disc((x, ground - part * height), size * height, leaf)
        leaf = _mix(leaf, (150, 160, 90), 0.18)


def _harbour(canvas: _Canvas) -> None:
    """Sailing boats at a quay in the morning, with their light on the water."""
    shore = 0.56
    canvas.gradient(0, shore, [(96, 160, 214), (170, 208, 232), (250, 232, 206)])
    canvas.glow((0.22, 0.34), 0.3, (60, 46, 20))
    canvas.disc((0.22, 0.34), 0.05, (255, 246, 220))
    _ridge(canvas, shore, 0.2, (7.0, 11.0), (134, 158, 176))
    _town(canvas, shore)
    canvas.gradient(shore, 1, [(196, 206, 204), (92, 150, 168), (22, 72, 104)])
    for index in range(26):  # ripples grow and part towards the viewer
        depth = (index / 26) ** 1.6
        y, reach = shore + 0.43 * depth + 0.01, 0.015 + 0.09 * depth
        x = (0.22 + 0.38 * index) % 1.0
        foam = _mix((232, 236, 226), (120, 176, 190), depth)
        canvas.polygon(
            [(x - reach, y), (x, y - 0.005), (x + reach, y), (x, y + 0.003 + 0.006 * depth)], foam
        )
    _boat(canvas, (0.7, 0.66), 0.34, ((178, 52, 44), (250, 246, 236)))
    _boat(canvas, (0.42, 0.62), 0.2, ((40, 78, 130), (252, 236, 204)))
    _boat(canvas, (0.9, 0.6), 0.13, ((60, 96, 74), (246, 246, 246)))
    canvas.polygon([(0, 0.82), (0.3, 0.9), (0.16, 1), (0, 1)], (92, 78, 66))
    canvas.polygon([(0, 0.82), (0.3, 0.9), (0.3, 0.915), (0, 0.845)], (142, 122, 100))


def _town(canvas: _Canvas, shore: Number) -> None:
    walls = ((216, 170, 120), (232, 214, 180), (190, 110, 90), (240, 232, 214), (172, 186, 180))
    for index in range(11):
        left, width = 0.3 + 0.064 * index, 0.058
        top = shore - 0.07 - 0.05 * ((index * 7) % 5) / 4
        canvas.polygon(
            [(left, shore), (left, top), (left + width, top), (left + width, shore)],
            walls[index % len(walls)],
        )
        canvas.polygon(
            [(left, top), (left + width / 2, top - 0.035), (left + width, top)], (150, 74, 58)
        )
        for column in (0.25, 0.65):
            x, y = left + column * width, top + 0.025
            canvas.polygon(
                [(x, y), (x + 0.009, y), (x + 0.009, y + 0.022), (x, y + 0.022)], (70, 84, 104)
            )


def _boat(canvas: _Canvas, water: Point, size: Number, colours: tuple[Colour, Colour]) -> None:
    hull, sail = colours

    def shape(colour: Colour, *points: Point) -> None:
        """A polygon in units of the boat's size, from the middle of its water line."""
        canvas.polygon([(water[0] + size * x, water[1] + size * y) for x, y in points], colour)

    shape(_mix(sail, (60, 110, 136), 0.7), (-0.3, 0), (0.3, 0), (0, 0.45))  # its reflection
    shape(hull, (-0.3, -0.08), (0.34, -0.1), (0.21, 0.04), (-0.22, 0.04))
    shape((84, 62, 48), (-0.008, -0.08), (-0.008, -1.15), (0.008, -1.15), (0.008, -0.08))
    shape(sail, (0.02, -1.15), (0.02, -0.16), (0.27, -0.16))
    shape(_mix(sail, hull, 0.12), (-0.02, -1.09), (-0.02, -0.16), (-0.21, -0.16))


def _corridor(canvas: _Canvas) -> None:
    """A long corridor with lamps and doors, lit from its far end."""
    far = 0.09  # half the size of the far wall
    left, right, top, bottom = 0.5 - far, 0.5 + far, 0.47 - far, 0.47 + far
    canvas.polygon([(0, 0), (1, 0), (right, top), (left, top)], (58, 62, 74))
    canvas.polygon([(0, 1), (1, 1), (right, bottom), (left, bottom)], (96, 74, 58))
    canvas.polygon([(0, 0), (left, top), (left, bottom), (0, 1)], (126, 138, 146))
    canvas.polygon([(1, 0), (right, top), (right, bottom), (1, 1)], (108, 120, 130))
    canvas.polygon([(left, top), (right, top), (right, bottom), (left, bottom)], (250, 244, 222))
    steps = [far / 0.5 * 1.42**power for power in range(8)]
    for index, (near, next_near) in enumerate(pairwise(steps)):
        _corridor_bay(canvas, near, min(next_near, 1.2), index)
    canvas.glow((0.5, 0.47), 0.3, (70, 62, 40))


def _corridor_bay(canvas: _Canvas, near: Number, next_near: Number, index: int) -> None:
    """One section between two depths: floor boards, a lamp and, in every second, two doors."""

    def at(x: Number, y: Number, scale: Number) -> Point:
        return 0.5 + (x - 0.5) * scale, 0.47 + (y - 0.47) * scale

    third = near + (next_near - near) * 0.35
    canvas.polygon([at(0, 1, near), at(1, 1, near), at(1, 1, third), at(0, 1, third)], (82, 62, 48))
    canvas.polygon(
        [at(0.42, 0, near), at(0.58, 0, near), at(0.58, 0, third), at(0.42, 0, third)],
        (255, 248, 226),
    )
    if index % 2:
        return
    start, end = near + (next_near - near) * 0.2, near + (next_near - near) * 0.8
    for wall, colour in ((0.0, (90, 58, 44)), (1.0, (76, 48, 38))):
        canvas.polygon(
            [at(wall, 0.25, start), at(wall, 0.25, end), at(wall, 1, end), at(wall, 1, start)],
            colour,
        )


SCENES: dict[str, Callable[[_Canvas], None]] = {
    "road": _road,
    "harbour": _harbour,
    "corridor": _corridor,
}
"""Name to the function that draws it."""
