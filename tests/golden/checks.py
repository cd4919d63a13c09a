"""What tests of the replay share."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tests.golden.archive import Archive
from tests.golden.replay import recipe_rows, replay_set
from tests.golden.report import FAIL, PASS, SKIP, Row
from tests.helpers.golden import golden_dir

FULL_SETS = () if golden_dir() is None else Archive(golden_dir()).names
LONG_SETS = ("e_encode_decode", "f_end_to_end")
"""All of them takes a minute; their subset runs with every change."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with another number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows_of(archive: Archive, name: str) -> list[Row]:
    """Verdicts on all arrays of a set."""
    with torch.inference_mode():
        return list(replay_set(archive, name))


def rows_of_recipe(archive: Archive, name: str, recipe: Mapping[str, Any]) -> list[Row]:
    """Verdicts on the arrays of one recipe of a set."""
    with torch.inference_mode():
        return list(recipe_rows(archive, name, "recipe", recipe))


def assert_replayed(archive: Archive, name: str) -> None:
    """Every array has a verdict, none failed, and only what is out of scope was skipped."""
    rows = rows_of(archive, name)
    assert [str(row) for row in rows if row.status == FAIL] == []
    assert {row.name for row in rows} >= set(archive.load(name).arrays)
    for row in rows:
        assert row.status != SKIP or "out of scope" in row.note
    assert sum(row.status == PASS for row in rows) > len(rows) / 2
