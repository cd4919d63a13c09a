"""The faults of the catalogue still fit the package; `make mutants` runs them."""

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.catalogue import MUTANTS, Mutant

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_can_be_put_in_and_checked(mutant: Mutant):
    for change in mutant.changes:
        assert (ROOT / change.file).read_text().count(change.old) == 1, change.file
        assert change.new != change.old
    if mutant.check.startswith("replay data "):
        name = mutant.check.rpartition(" ")[2]
        assert (ROOT / "tests" / "golden" / "data" / "arrays" / f"{name}.safetensors").is_file()
    elif not mutant.check.startswith("replay oracle "):
        file, _, test = mutant.check.partition("::")
        assert f"def {test or 'test_'}" in (ROOT / file).read_text()


def test_faults_have_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 19
