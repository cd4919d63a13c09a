"""Access to the golden arrays: a small subset in the repository, the full set where it is given."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

_BESIDE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "golden"
SUBSET_DIR = Path(__file__).resolve().parents[1] / "golden" / "data"


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """Arrays of one set and the manifest that says what they are."""

    arrays: dict[str, torch.Tensor]
    manifest: dict


def golden_dir() -> Path | None:
    """Directory of the full golden data, or None where it was not given."""
    named = os.environ.get("LINGBOT_GOLDEN_DIR")
    if named:
        return Path(named)
    return _BESIDE_CHECKOUT if (_BESIDE_CHECKOUT / "arrays").is_dir() else None


requires_golden = pytest.mark.skipif(
    golden_dir() is None, reason="full golden arrays not given (set LINGBOT_GOLDEN_DIR)"
)


def load_set(name: str, directory: Path | None = None) -> GoldenSet:
    """Load ``arrays/NAME.{json,safetensors}`` of a golden directory."""
    root = directory or golden_dir()
    assert root is not None, "call behind requires_golden"
    manifest = json.loads((root / "arrays" / f"{name}.json").read_text())
    return GoldenSet(load_file(root / "arrays" / f"{name}.safetensors"), manifest)


def assert_matches(actual: torch.Tensor, golden: GoldenSet, name: str) -> None:
    """Compare with a golden array under the manifest's own tolerance."""
    entry = golden.manifest["arrays"][name]
    torch.testing.assert_close(
        actual, golden.arrays[name], rtol=entry.get("rtol", 0.0), atol=entry.get("atol", 0.0)
    )
