"""All golden sets, whole, at one and at two threads."""

import pytest

from tests.golden.archive import Archive
from tests.golden.checks import FULL_SETS, assert_replayed, threads
from tests.helpers.golden import golden_dir, requires_golden

__all__ = ["threads"]

pytestmark = [pytest.mark.advanced_model, pytest.mark.diffusion, pytest.mark.cpu]


@requires_golden
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("name", FULL_SETS)
def test_full_sets(name):
    """Under the manifests' tolerances."""
    assert_replayed(Archive(golden_dir()), name)
