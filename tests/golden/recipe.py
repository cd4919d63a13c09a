"""A recipe: one experiment, with every input and every number, and the arrays that it makes.

Nothing is guessed: a key that an operation needs and does not find fails, and so does a key that
it does not know. The keys of each operation stand in ``README.md`` beside this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.golden.archive import Archive, RecipeError
from vllm_omni.diffusion.distributed.parallel_state import ParallelState

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Keys:
    """The keys of one object of a recipe, each read once; :meth:`done` refuses what is left."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise RecipeError(f"{where} must be an object, got {values!r:.60}")
        self._left = dict(values)
        self.where = where

    def take(self, key: str) -> Any:
        """The value of a key that has to be there."""
        if key not in self._left:
            raise RecipeError(f"{self.where} says no {key}, and {key} has no default")
        return self._left.pop(key)

    def optional(self, key: str) -> Any:
        """The value of a key, ``None`` where there is none."""
        return self._left.pop(key, None)

    def integer(self, key: str) -> int:
        """A whole number."""
        value = self.take(key)
        if type(value) is not int:
            raise RecipeError(f"{self.where}: {key} must be a whole number, got {value!r:.60}")
        return value

    def number(self, key: str) -> float:
        """A number."""
        return _number(self.take(key), f"{self.where}: {key}")

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.take(key)
        if type(value) is not bool:
            raise RecipeError(f"{self.where}: {key} must be true or false, got {value!r:.60}")
        return value

    def text(self, key: str) -> str:
        """A text, or a reference."""
        value = self.take(key)
        if not isinstance(value, str):
            raise RecipeError(f"{self.where}: {key} must be a text, got {value!r:.60}")
        return value

    def inside(self, key: str) -> "Keys":
        """An object inside this one."""
        return Keys(self.take(key), f"{self.where}, {key}")

    def dtype(self, key: str = "dtype") -> torch.dtype:
        """A kind of floats, by its name in torch."""
        name = self.text(key)
        if name not in DTYPES:
            raise RecipeError(f"{self.where}: {key} must be one of {', '.join(DTYPES)}: {name!r}")
        return DTYPES[name]

    def has(self, key: str) -> bool:
        """Whether a key is there and was not read."""
        return key in self._left

    def done(self) -> None:
        """Refuse keys that nobody has read."""
        if self._left:
            raise RecipeError(f"{self.where} has keys without a meaning: {', '.join(self._left)}")


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"{where} must be a number, got {value!r:.60}")
    return float(value)


@dataclass(frozen=True)
class Recipe:
    """One experiment of a set.

    Attributes:
        outputs: name of the result by name of the array; an array of another set is ``SET:ARRAY``.
        dtypes: what the manifest says of the kinds of floats among the output arrays.
        forced: kind of floats to compute in instead of the recipe's own.
    """

    name: str
    op: str
    values: Mapping[str, Any]
    outputs: Mapping[str, str]
    dtypes: frozenset[str] = frozenset()
    forced: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        """Processes that the recipe wants; the operations that need the key ask for it."""
        ranks = self.values.get("ranks", 1)
        if type(ranks) is not int or ranks < 1:
            raise RecipeError(f"{self.name}: ranks must be a whole number, got {ranks!r}")
        return ranks

    @property
    def is_low(self) -> bool:
        """Whether results are rounded to bfloat16."""
        return "bfloat16" in self.dtypes or self.values.get("dtype") == "bfloat16"

    def in_float32(self) -> "Recipe":
        """The same experiment without rounding to bfloat16."""
        return replace(self, forced=torch.float32)


@dataclass(frozen=True)
class Job:
    """What an operation gets.

    Attributes:
        keys: of the recipe, without ``op`` and ``outputs``.
        wanted: names of the results that are compared.
        parallel: the groups of this rank.
    """

    recipe: Recipe
    archive: Archive
    keys: Keys
    wanted: frozenset[str]
    parallel: ParallelState = field(default_factory=ParallelState)

    @classmethod
    def of(cls, recipe: Recipe, archive: Archive, parallel: ParallelState) -> "Job":
        """The work of one rank."""
        wanted = frozenset(recipe.outputs.values())
        return cls(recipe, archive, Keys(recipe.values, recipe.name), wanted, parallel)

    @property
    def rank(self) -> str:
        """Which rank of how many this is, in words; empty where there is one."""
        group = self.parallel.control
        return f"rank {group.rank} of {group.size}" if group.size > 1 else ""

    def dtype(self) -> torch.dtype:
        """The kind of floats to compute in, which the recipe has to say."""
        said = self.keys.dtype()
        return self.recipe.forced or said

    def dtype_of_outputs(self) -> torch.dtype:
        """The kind of floats that the recipe says, else the one that its arrays have."""
        if self.keys.has("dtype"):
            return self.dtype()
        if len(self.recipe.dtypes) != 1:
            raise RecipeError(
                f"{self.recipe.name} says no dtype, and its arrays do not have one: "
                f"{', '.join(sorted(self.recipe.dtypes)) or 'none are floats'}"
            )
        (name,) = self.recipe.dtypes
        return self.recipe.forced or DTYPES[name]

    def tensor(self, key: str) -> torch.Tensor:
        """The array that a key refers to."""
        return self.archive.tensor(self.keys.text(key))


@dataclass(frozen=True)
class Run:
    """The results of one way to do an experiment.

    Attributes:
        label: which way, for example ``scattered pages, rank 1``.
    """

    label: str
    made: Mapping[str, torch.Tensor]
