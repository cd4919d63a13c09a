"""Marks of a test by the hardware that it needs, and of a costly variant by its level."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

CPU = "cpu"
HARDWARE_MARKS = frozenset({CPU, "gpu", "cuda", "npu"})
LEVEL_MARKS = frozenset({"core_model", "advanced_model", "full_model"})
advanced = partial(pytest.param, marks=pytest.mark.advanced_model)
"""Values of a costly variant, which runs before a release."""


def hardware_test(
    res: Mapping[str, str], *, num_cards: int | Mapping[str, int] = 1
) -> Callable[[Any], Any]:
    """Mark a test with its platform and skip it where that hardware is absent.

    Args:
        res: platform (``"cpu"``, ``"cuda"`` or ``"npu"``) to the card it was written for, for
            example ``{"cuda": "H100"}``. The test runs if one of the platforms is there.
        num_cards: cards needed, for all platforms or for each.
    """
    unknown = set(res) - {"cpu", "cuda", "npu"}
    if unknown or not res:
        raise ValueError(f"platforms are cpu, cuda and npu, got {sorted(res)}")
    needed = {name: _cards_for(name, num_cards) for name in res}
    marks = [pytest.mark.skipif(not _any_available(needed), reason=f"needs {needed} cards")]
    for platform in res:
        marks.append(_mark(platform))
        if platform != CPU:
            marks.append(pytest.mark.gpu)

    def decorate(test: Any) -> Any:
        for mark in marks:
            test = mark(test)
        return test

    return decorate


def _mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.__getattr__(name)


def _cards_for(platform: str, num_cards: int | Mapping[str, int]) -> int:
    return num_cards if isinstance(num_cards, int) else num_cards[platform]


def _any_available(needed: Mapping[str, int]) -> bool:
    return any(_visible_cards(platform) >= count for platform, count in needed.items())


def _visible_cards(platform: str) -> int:
    import torch  # only tests that name a platform pay for it

    if platform == "cpu":
        return 1
    if platform == "cuda":
        return torch.cuda.device_count()
    # Torch has it once torch_npu has been loaded.
    return torch.npu.device_count() if "npu" in vars(torch) else 0
