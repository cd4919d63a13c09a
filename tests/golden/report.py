"""Compares what a replay made with the golden arrays and prints one line per array."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.golden import GoldenSet

PASS, FAIL, SKIP, INPUT = "pass", "FAIL", "skip", "input"
REMADE_INPUT = {"rtol": 1e-5, "atol": 1e-5}
"""For an input that the replay also makes itself; manifests give tolerances to outputs only. It is
the tolerance of latents: the same arithmetic in another order."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Stands in the place of an array that is not replayed on purpose."""

    reason: str


Made = torch.Tensor | Skipped
"""What a replay makes for one name."""


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one array.

    Attributes:
        difference: largest absolute difference, ``None`` where nothing was compared.
    """

    name: str
    status: str
    difference: float | None = None
    tolerance: str = ""
    note: str = ""

    def __str__(self) -> str:
        difference = "-" if self.difference is None else f"{self.difference:.3g}"
        line = f"{self.status:5} {self.name:58} {difference:>10}  {self.tolerance}"
        return f"{line}  {self.note}".rstrip()


def compare(name: str, made: Made, golden: GoldenSet, *, like: str | None = None) -> Row:
    """Judge one array under the manifest's own tolerance, exactly where it names none.

    Args:
        like: name of the golden array to compare with when it is not ``name``.
    """
    if isinstance(made, Skipped):
        return Row(name, SKIP, note=made.reason)
    target = like or name
    entry = golden.manifest["arrays"][target]
    if entry.get("role") == "input":
        entry = {**entry, **REMADE_INPUT}
    return compare_arrays(name, made, golden.arrays[target], entry)


def compare_arrays(
    name: str, made: torch.Tensor, expected: torch.Tensor, entry: Mapping[str, Any]
) -> Row:
    """Judge an array against another; leading axes of size one do not count."""
    rtol, atol = float(entry.get("rtol", 0.0)), float(entry.get("atol", 0.0))
    tolerance = f"{atol:.0e} + {rtol:.0e} |x|" if rtol or atol else "exact"
    if _plain_shape(made) != _plain_shape(expected):
        note = f"shape {list(made.shape)}, golden {list(expected.shape)}"
        return Row(name, FAIL, None, tolerance, note)
    if torch.promote_types(made.dtype, expected.dtype) != expected.dtype:
        return Row(name, FAIL, None, tolerance, f"dtype {made.dtype}, golden {expected.dtype}")
    wide, golden = made.reshape(expected.shape).double(), expected.double()
    difference = (wide - golden).abs()
    # Written so that a NaN on one side fails; on both sides it is the same value.
    close = (difference <= atol + rtol * golden.abs()) | (wide == golden)
    close |= wide.isnan() & golden.isnan()
    largest = float(difference.max()) if difference.numel() else 0.0
    wrong = int((~close).sum())
    note = f"{wrong} of {close.numel()} values out of tolerance" if wrong else ""
    return Row(name, FAIL if wrong else PASS, largest, tolerance, note)


def _plain_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape
