"""Options and collection rules. Tests import their fixtures, so they also run without this file."""

import os

import pytest

from tests.helpers.fixtures import retries, run_args
from tests.helpers.fixtures.run_args import RUN_LEVELS, run_level
from tests.helpers.mark import HARDWARE_MARKS, LEVEL_MARKS

__all__ = ["run_level"]

# Intel's library sums a few rows in another order than many unless it is told to be strict; then
# work that several ranks share out has the bytes of one rank. Read at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the options of the helpers."""
    run_args.pytest_addoption(parser)
    pluginmanager.register(retries)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse unmarked tests; leave out what is above the level, and soak unless asked for."""
    unmarked = [item.nodeid for item in items if missing_marks(item)]
    if unmarked:
        listing = "\n  ".join(f"{node}" for node in unmarked)
        raise pytest.UsageError(
            f"each test needs a mark of {sorted(LEVEL_MARKS)} and one of "
            f"{sorted(HARDWARE_MARKS)}; missing on\n  {listing}"
        )
    left_out = [item for item in items if not _wanted(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def missing_marks(item: pytest.Item) -> bool:
    """Whether the test lacks a level mark or a hardware mark."""
    names = {mark.name for mark in item.iter_markers()}
    return not (names & LEVEL_MARKS and names & HARDWARE_MARKS)


def _wanted(config: pytest.Config, item: pytest.Item) -> bool:
    names = {mark.name for mark in item.iter_markers()}
    if "soak" in names and "soak" not in config.getoption("markexpr"):
        return False
    allowed = RUN_LEVELS[: RUN_LEVELS.index(config.getoption("--run-level")) + 1]
    return names & set(RUN_LEVELS) <= set(allowed)
