"""Compares what a replay made with the golden arrays and prints one line per array."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.golden.recipe import Run

PASS, FAIL, SKIP, INPUT = "pass", "FAIL", "skip", "input"
REMADE_INPUT = {"rtol": 1e-5, "atol": 1e-5}
"""For an input that a recipe also makes itself; manifests give tolerances to outputs only. It is
the tolerance of latents: the same arithmetic in another order."""
_EQUAL_SHARE = 0.9
_RMS_SPREAD = 0.02


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


@dataclass(frozen=True)
class Target:
    """A golden array and what its manifest says of it."""

    array: torch.Tensor
    entry: Mapping[str, Any]

    @property
    def float_name(self) -> str:
        """Kind of floats, empty for an array of integers."""
        is_float = self.array.is_floating_point()
        return str(self.array.dtype).removeprefix("torch.") if is_float else ""


def judge(name: str, result: str, runs: Sequence[Run], target: Target, exact: Sequence[Run]) -> Row:
    """The worst verdict on a result over all runs that made it; a result that none made fails.

    Args:
        exact: the same runs in float32, for results that are rounded to bfloat16.
    """
    if not any(result in run.made for run in runs):
        kinds = sorted({made.partition("/")[0] for run in runs for made in run.made})
        return Row(name, FAIL, note=f"nothing made {result}; there are {', '.join(kinds)}")
    entry = target.entry
    if entry.get("role") == "input":
        entry = {**entry, **REMADE_INPUT}
    rows = []
    for index, run in enumerate(runs):
        if result not in run.made:
            continue
        row = compare_arrays(name, run.made[result], target.array, entry)
        if row.status == PASS and exact and target.array.is_floating_point():
            row = _compare_rounding(row, run.made[result], target.array, exact[index].made[result])
        rows.append(replace(row, note=f"{row.note} {_bracketed(run.label)}".strip()))
    failed = [row for row in rows if row.status == FAIL]
    worst = max(failed or rows, key=lambda row: row.difference or 0.0)
    return worst if failed else replace(worst, note=f"{len(rows)} runs" if len(rows) > 1 else "")


def compare_arrays(
    name: str, made: torch.Tensor, expected: torch.Tensor, entry: Mapping[str, Any]
) -> Row:
    """Judge an array under the manifest's own tolerance, exactly where it names none.

    Leading axes of size one do not count. A result in bfloat16 is only compared with an array of
    bfloat16 numbers.
    """
    rtol, atol = float(entry.get("rtol", 0.0)), float(entry.get("atol", 0.0))
    tolerance = f"{atol:.0e} + {rtol:.0e} |x|" if rtol or atol else "exact"
    if _plain_shape(made) != _plain_shape(expected):
        note = f"shape {list(made.shape)}, golden {list(expected.shape)}"
        return Row(name, FAIL, None, tolerance, note)
    if made.dtype != expected.dtype and not _holds_only(expected, made.dtype):
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


def _compare_rounding(
    row: Row, made: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor
) -> Row:
    """Tell one rounding too many, which no tolerance of bfloat16 shows.

    Either nine of ten values are the golden ones bit for bit, or the error against float32 is as
    large as the golden error within 2 %.
    """
    ours, golden = made.reshape(expected.shape).double(), expected.double()
    reference = exact.reshape(expected.shape).double()
    equal = float((ours == golden).double().mean())
    errors = [float((each - reference).square().mean().sqrt()) for each in (ours, golden)]
    if equal >= _EQUAL_SHARE or abs(errors[0] - errors[1]) <= _RMS_SPREAD * errors[1]:
        return row
    note = (
        f"{100 * equal:.0f} % of the values bit-equal, rms error to float32 {errors[0]:.4g}, "
        f"golden {errors[1]:.4g}: rounded at other places"
    )
    return replace(row, status=FAIL, note=note)


def _holds_only(expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether an array of wider floats holds nothing but numbers of ``dtype``."""
    if dtype != torch.bfloat16 or not expected.is_floating_point():
        return False
    return torch.equal(expected.to(dtype).to(expected.dtype), expected)


def _bracketed(label: str) -> str:
    return f"({label})" if label else ""


def _plain_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape
