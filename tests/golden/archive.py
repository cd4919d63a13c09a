"""The golden sets of one directory, and what the references of a recipe stand for.

``SET:ARRAY`` is an array, ``SET:PREFIX.`` all arrays whose names begin so, ``SET:facts/A/B`` a fact
of the manifest, and ``inputs/FILE`` a file beside the arrays.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tests.helpers.golden import GoldenSet, load_set
from tests.helpers.tiny import tiny_checkpoint_dir

KEPT_RECIPES = Path(__file__).parent / "recipes"
"""Recipes of sets whose manifests bring none, by the name of the set."""
TINY = "tiny-lingbot-world"
_FACTS = "facts/"
_FILES = "inputs/"


class RecipeError(ValueError):
    """A recipe that says too little, too much, or something that is not there."""


@dataclass(frozen=True)
class Archive:
    """A directory with ``arrays/``, ``inputs/`` and checkpoints."""

    root: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Sets that have both a manifest and arrays, sorted."""
        manifests = sorted((self.root / "arrays").glob("*.json"))
        return tuple(path.stem for path in manifests if path.with_suffix(".safetensors").is_file())

    @cached_property
    def _loaded(self) -> dict[str, GoldenSet]:
        return {}

    def load(self, name: str) -> GoldenSet:
        """One set; loaded once."""
        if name not in self._loaded:
            self._loaded[name] = load_set(name, self.root)
        return self._loaded[name]

    def recipes(self, name: str) -> list[Mapping[str, Any]]:
        """The recipes of a set: those of its manifest, else those kept for exactly these arrays.

        Raises:
            RecipeError: if recipes are kept for a set of this name with other arrays.
        """
        manifest = self.load(name).manifest
        if "recipes" in manifest:
            return manifest["recipes"]
        kept = KEPT_RECIPES / f"{name}.json"
        if not kept.is_file():
            return []
        content = json.loads(kept.read_text())
        if content["sha256"] != manifest.get("sha256"):
            raise RecipeError(f"{kept.name} is for other arrays than those of this {name}")
        return content["recipes"]

    def tensor(self, reference: str) -> torch.Tensor:
        """The array that a reference names."""
        name, inside = self._split(reference)
        arrays = self.load(name).arrays
        if inside not in arrays:
            raise RecipeError(f"{reference}: the set {name} has no such array")
        return arrays[inside]

    def tensors(self, reference: str) -> dict[str, torch.Tensor]:
        """The arrays below a prefix, by the rest of their names."""
        name, prefix = self._split(reference)
        arrays = self.load(name).arrays
        found = {full[len(prefix) :]: arrays[full] for full in arrays if full.startswith(prefix)}
        if not found:
            raise RecipeError(f"{reference}: the set {name} has no array that begins so")
        return found

    def fact(self, reference: str) -> Any:
        """The value below ``facts`` that a reference names."""
        name, inside = self._split(reference)
        if not inside.startswith(_FACTS):
            raise RecipeError(f"{reference} is not SET:facts/PATH")
        value: Any = self.load(name).manifest.get("facts", {})
        for key in inside.removeprefix(_FACTS).split("/"):
            if not isinstance(value, Mapping) or key not in value:
                raise RecipeError(f"{reference}: there is no {key!r}")
            value = value[key]
        return value

    def file(self, reference: str) -> Path:
        """The file or folder ``inputs/...``."""
        path = self.root / reference
        if not path.exists():
            raise RecipeError(f"{reference}: no such file beside the arrays")
        return path

    def is_reference(self, value: object) -> bool:
        """Whether a value of a recipe is a reference to a set of this directory."""
        return isinstance(value, str) and value.partition(":")[0] in self.names and ":" in value

    def resolved(self, value: Any) -> Any:
        """The value with references, at any depth, replaced by what they name."""
        if isinstance(value, Mapping):
            return {key: self.resolved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolved(item) for item in value]
        if not self.is_reference(value):
            return value
        is_fact = value.partition(":")[2].startswith(_FACTS)
        return self.fact(value) if is_fact else self.tensor(value)

    def text(self, value: str) -> str:
        """The text itself, or what a fact or a text file holds that it refers to."""
        text = str(self.resolved(value))
        return self.file(text).read_text(encoding="utf-8") if text.startswith(_FILES) else text

    def picture(self, value: str) -> Path | torch.Tensor:
        """The picture file or array that a reference names."""
        found = self.resolved(value)
        return found if isinstance(found, torch.Tensor) else self.file(str(found))

    def checkpoint(self, name: str) -> Path:
        """A checkpoint of the directory; the tiny one is written where the directory lacks it."""
        path = self.root / name
        if (path / "model_index.json").is_file():
            return path
        if name == TINY:
            return tiny_checkpoint_dir()
        raise RecipeError(f"checkpoint {name!r}: no such folder beside the arrays")

    def _split(self, reference: str) -> tuple[str, str]:
        name, colon, inside = reference.partition(":")
        if not colon or name not in self.names:
            raise RecipeError(
                f"{reference!r} is no reference: SET:ARRAY or SET:facts/PATH is needed, "
                f"SET one of {', '.join(self.names)}"
            )
        return name, inside
