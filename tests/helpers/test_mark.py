"""The hardware decorator marks a test for lane selection and skips it where the cards lack."""

import pytest
import torch

from tests.helpers.mark import hardware_test

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


def _marks(res: dict[str, str], **options: object) -> dict[str, pytest.Mark]:
    def sample() -> None: ...

    return {mark.name: mark for mark in hardware_test(res, **options)(sample).pytestmark}


def test_cpu_always_runs():
    marks = _marks({"cpu": ""})
    assert set(marks) == {"cpu", "skipif"}
    assert marks["skipif"].args == (False,)


def test_an_absent_card_skips():
    marks = _marks({"cuda": "H100"}, num_cards=99)
    assert set(marks) == {"cuda", "gpu", "skipif"}
    assert marks["skipif"].args == (True,)


def test_cards_are_counted_for_each_platform():
    present = torch.cuda.device_count()
    marks = _marks({"cuda": "", "npu": ""}, num_cards={"cuda": present, "npu": 99})
    assert {"cuda", "npu", "gpu"} <= set(marks)
    assert marks["skipif"].args == (False,)


@pytest.mark.parametrize("res", [{}, {"rocm": "MI325"}])
def test_other_platforms_are_refused(res):
    with pytest.raises(ValueError, match="cpu, cuda and npu"):
        hardware_test(res)
