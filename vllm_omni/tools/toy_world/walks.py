"""Walkers in the place and the random walks that the model learns from.

A walker is driven by moves (one key step = length 1 = ``STEP`` metres) and turns, one for each
latent frame, and yields at once what the picture shows and what the model is told: the twelve
numbers of a camera delta, rotation row by row and translation, in the frame of the camera before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from vllm_omni.diffusion.camera_motion import (
    PITCH_LIMIT_RAD,
    PITCH_STEP_RAD,
    YAW_STEP_RAD,
)
from vllm_omni.diffusion.geometry import LATENT_FRAMES_PER_CHUNK, TEMPORAL_FACTOR
from vllm_omni.diffusion.utils.island import (
    LIGHTS,
    PITCH_LIMIT,
    WALK_RADIUS,
    View,
    blocked,
    render,
)

STEP = 0.3
"""Metres of one key step: a viewer at 16 frames a second walks at 1.2 m/s."""


@dataclass(frozen=True, slots=True)
class Motion:
    """What a camera asks for in one latent frame: moves in key steps, turns in radians."""

    forward: float = 0.0
    right: float = 0.0
    yaw: float = 0.0
    pitch: float = 0.0


def key_motion(held: frozenset[str]) -> Motion:
    """The motion of held keys, as ``camera_motion.py`` integrates them."""

    def axis(positive: str, negative: str) -> float:
        return float(positive in held) - float(negative in held)

    return Motion(
        axis("w", "s"),
        axis("d", "a"),
        axis("l", "j") * YAW_STEP_RAD,
        axis("i", "k") * PITCH_STEP_RAD,
    )


def script(text: str) -> list[frozenset[str]]:
    """Keys of each latent frame: ``w4 wl2 -3`` is w four times, w and l twice, none three times."""
    frames: list[frozenset[str]] = []
    for word in text.split():
        keys = word.rstrip("0123456789")
        count = int(word[len(keys) :] or 1)
        frames += [frozenset(keys.replace("-", ""))] * count
    return frames


def script_motions(keys: Sequence[frozenset[str]]) -> list[Motion]:
    """What a script of keys makes the camera do: the longest step of each chunk has length 1."""
    motions = []
    for first in range(0, len(keys), LATENT_FRAMES_PER_CHUNK):
        chunk = [key_motion(held) for held in keys[first : first + LATENT_FRAMES_PER_CHUNK]]
        longest = max(math.hypot(motion.forward, motion.right) for motion in chunk) or 1.0
        motions += [
            replace(motion, forward=motion.forward / longest, right=motion.right / longest)
            for motion in chunk
        ]
    return motions


def _rotation(heading: float, pitch: float) -> Float[np.ndarray, "3 3"]:
    c, s, cp, sp = math.cos(heading), math.sin(heading), math.cos(pitch), math.sin(pitch)
    about_y = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    about_x = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    return about_y @ about_x


class Walker:
    """A place to stand and a view; ``step`` moves it and slides it along what is solid."""

    def __init__(self, x: float, z: float, heading: float) -> None:
        self.x, self.z, self.heading = x, z, heading
        self.pitch = 0.0
        """Where the camera is tilted to; the view stops at ``PITCH_LIMIT``."""
        self.neck = 0.0
        self.hit = False

    @classmethod
    def anywhere(cls, rng: np.random.Generator) -> "Walker":
        """A walker at a free place, drawn evenly."""
        while True:
            x, z = (float(v) for v in rng.uniform(-WALK_RADIUS, WALK_RADIUS, 2))
            if not blocked(x, z):
                return cls(x, z, float(rng.uniform(-math.pi, math.pi)))

    def scout(self) -> "Walker":
        """Another walker at this place, who may go ahead alone."""
        return Walker(self.x, self.z, self.heading)

    def view(self) -> View:
        """Return what the picture shows from where the walker stands."""
        return View(self.x, self.z, self.heading, self.neck)

    def step(self, motion: Motion) -> Float[np.ndarray, "12"]:
        """Move by one latent frame and return the camera delta, which knows of no obstacle."""
        before = _rotation(self.heading, self.pitch)
        tilt = motion.pitch if abs(self.pitch + motion.pitch) <= PITCH_LIMIT_RAD else 0.0
        self.heading += motion.yaw
        self.pitch += tilt
        self.neck = min(PITCH_LIMIT, max(-PITCH_LIMIT, self.neck + tilt))
        s, c = math.sin(self.heading), math.cos(self.heading)
        dx, dz = motion.forward * s + motion.right * c, motion.forward * c - motion.right * s
        self.hit = False
        for x, z in ((dx * STEP, 0.0), (0.0, dz * STEP)):
            if blocked(self.x + x, self.z + z):
                self.hit = True
            else:
                self.x, self.z = self.x + x, self.z + z
        after = _rotation(self.heading, self.pitch)
        return np.concatenate([(before.T @ after).ravel(), before.T @ np.array([dx, 0.0, dz])])


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk as the model meets it."""

    frames: UInt8[np.ndarray, "pixel_frames height width 3"]
    deltas: Float32[np.ndarray, "latent_frames 12"]
    prompts: Int64[np.ndarray, "chunks"]
    """The light that the prompt of each chunk names."""
    steady: bool
    """Whether the first picture shows the only light there is, so that a prompt may name none."""
    keys: bool
    """Whether keys steer; else a recorded path."""


def chunk_lights(prompts: Sequence[int], first: int) -> list[list[Float[np.ndarray, "3"]]]:
    """Lights at the end of each pixel frame, by latent frame: a chunk fades into its prompt's."""
    eye = np.eye(len(LIGHTS))
    now, frames = eye[first], [[eye[first]]]
    for index, target in enumerate(prompts):
        steps = (LATENT_FRAMES_PER_CHUNK - (index == 0)) * TEMPORAL_FACTOR
        fade = [now + (eye[target] - now) * (k + 1) / steps for k in range(steps)]
        frames += [fade[k : k + TEMPORAL_FACTOR] for k in range(0, steps, TEMPORAL_FACTOR)]
        now = eye[target]
    return frames


def film(
    walker: Walker,
    motions: Sequence[Motion],
    lights: list[list[Float[np.ndarray, "3"]]],
    **size: int,
) -> tuple[UInt8[np.ndarray, "pixel_frames height width 3"], Float32[np.ndarray, "latents 12"]]:
    """Walk and paint. The motion of latent frame 0 reaches the delta only: its picture is given."""
    pictures = [render(walker.view(), lights[0][0], **size)]
    deltas = [walker.scout().step(motions[0])]
    for motion, fade in zip(motions[1:], lights[1:], strict=True):
        old = walker.view()
        deltas.append(walker.step(motion))
        new = walker.view()
        for k, light in enumerate(fade):
            share = (k + 1) / TEMPORAL_FACTOR
            view = View(
                *(a + (b - a) * share for a, b in zip(astuple(old), astuple(new), strict=True))
            )
            pictures.append(render(view, light, **size))
    return np.stack(pictures), np.stack(deltas).astype(np.float32)


Policy = Callable[[Walker], Motion]


def key_presses(rng: np.random.Generator) -> Callable[[Walker], frozenset[str]]:
    """Keys held for a while; turns away from what it bumps into, comes back to a level view."""
    held, left, tilt = "", 0, ""

    def press(walker: Walker) -> frozenset[str]:
        nonlocal held, left, tilt
        if left <= 0 or (walker.hit and rng.random() < 0.4):
            turn, side = str(rng.choice(["j", "l"])), str(rng.choice(["a", "d"]))
            options = ["w", "w" + turn, turn, "s", side, "w" + side, "", "s" + turn, side + turn]
            odds = [0.26, 0.19, 0.18, 0.1, 0.13, 0.03, 0.04, 0.03, 0.04]
            held = options[rng.choice(len(options), p=odds)]
            left = int(rng.integers(2, 13))
            tilt = ""
            if rng.random() < 0.2:
                tilt = str(rng.choice(["i", "k"]))
            elif abs(walker.neck) > 0.01 and rng.random() < 0.7:
                tilt = "k" if walker.neck > 0 else "i"
        left -= 1
        keys = frozenset(held + tilt)
        if tilt and abs(walker.neck) > 0.01 and abs(walker.neck + key_motion(keys).pitch) < 0.01:
            tilt = ""  # level again
        return keys

    return press


def _key_policy(rng: np.random.Generator) -> Policy:
    # A script's longest step has length 1, a live diagonal is longer.
    diagonal = 1.0 if rng.random() < 0.5 else math.sqrt(0.5)
    press = key_presses(rng)

    def policy(walker: Walker) -> Motion:
        motion = key_motion(press(walker))
        if motion.forward and motion.right:
            scaled = {"forward": motion.forward * diagonal, "right": motion.right * diagonal}
            return replace(motion, **scaled)
        return motion

    return policy


def _glide_policy(rng: np.random.Generator) -> Policy:
    """A gliding camera whose speeds change slowly."""
    now, goal, left = np.array([0.5, 0.0, 0.0]), np.zeros(3), 0

    def policy(walker: Walker) -> Motion:
        nonlocal now, goal, left
        if left <= 0 or walker.hit:
            tilt = rng.uniform(-0.4, 0.4) if rng.random() < 0.3 else 0.0
            goal = np.array([rng.uniform(-0.3, 1.0), rng.uniform(-1, 1), tilt])
            left = int(rng.integers(4, 16))
        left -= 1
        now = now + 0.35 * (goal - now)
        pitch = float(now[2]) * PITCH_STEP_RAD - 0.1 * walker.pitch
        return Motion(float(now[0]), 0.0, float(now[1]) * YAW_STEP_RAD, pitch)

    return policy


def random_walk(seed: int, *, chunks: int, **size: int) -> Walk:
    """One walk, the same for the same seed."""
    rng = np.random.default_rng(seed)
    walker = Walker.anywhere(rng)
    keys = bool(rng.random() < 0.75)
    policy = _key_policy(rng) if keys else _glide_policy(rng)
    first = int(rng.integers(len(LIGHTS)))
    prompts = np.full(chunks, first if rng.random() < 0.9 else int(rng.integers(len(LIGHTS))))
    if rng.random() < 0.35:
        prompts[int(rng.integers(1, chunks)) :] = rng.integers(len(LIGHTS))
    # The policy looks at the walker, so the motions are found on a walker of their own.
    scout = walker.scout()
    motions = [policy(scout)]
    for _ in range(LATENT_FRAMES_PER_CHUNK * chunks - 1):
        motions.append(policy(scout))
        scout.step(motions[-1])
    frames, deltas = film(walker, motions, chunk_lights(prompts.tolist(), first), **size)
    return Walk(frames, deltas, prompts, bool((prompts == first).all()), keys)
