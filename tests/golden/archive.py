"""The golden sets of one directory, and what a set may borrow from its neighbours."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.helpers.golden import GoldenSet, load_set
from tests.helpers.tiny import tiny_checkpoint_dir


@dataclass(frozen=True)
class Archive:
    """A directory with ``arrays/``, ``inputs/`` and a checkpoint."""

    root: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sets that have both a manifest and arrays, sorted."""
        manifests = sorted((self.root / "arrays").glob("*.json"))
        return tuple(path.stem for path in manifests if path.with_suffix(".safetensors").is_file())

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint beside the arrays, else one made by the recipe it was made with."""
        found = sorted(self.root.glob("*/model_index.json"))
        return found[0].parent if found else tiny_checkpoint_dir()

    @cached_property
    def _loaded(self) -> dict[str, GoldenSet]:
        return {}

    def load(self, name: str) -> GoldenSet:
        """One set; loaded once."""
        if name not in self._loaded:
            self._loaded[name] = load_set(name, self.root)
        return self._loaded[name]

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of a set, without its arrays."""
        return json.loads((self.root / "arrays" / f"{name}.json").read_text())

    def borrow(self, name: str, like: Mapping[str, object]) -> torch.Tensor | None:
        """An array called ``name`` of a neighbour that brings no weights of its own.

        Args:
            like: entry fields that the neighbour's manifest must have, for example its shape.
        """
        for neighbour in self.names:
            entries = self.manifest(neighbour)["arrays"]
            own_weights = any("weights" in entry.split(".") for entry in entries)
            if name in entries and not own_weights:
                entry = entries[name]
                if all(entry.get(field) == value for field, value in like.items()):
                    return self.load(neighbour).arrays[name]
        return None


def find_facts(value: object, key: str) -> Iterator[Any]:
    """Every value stored under ``key`` at any depth of a manifest, outermost first."""
    if isinstance(value, Mapping):
        if key in value:
            yield value[key]
        for child in value.values():
            yield from find_facts(child, key)
    elif isinstance(value, list):
        for child in value:
            yield from find_facts(child, key)


def first_fact(manifest: Mapping[str, Any], key: str) -> Any:
    """The outermost fact of that name, ``None`` where there is none."""
    return next(find_facts(manifest.get("facts", {}), key), None)
