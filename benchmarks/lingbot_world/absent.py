"""Stands in for pydantic on a machine without it, as soon as this is imported.

A script that measures a device makes its own settings, so that nothing has to be checked: types
are declared as always, models take their fields as they are. This is imported before the package.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound="UncheckedModel")


class UncheckedModel:
    """A model whose fields are taken as they are; lists become tuples, as fields are declared."""

    model_fields: Mapping[str, object] = {}

    def __init_subclass__(cls, **_: object) -> None:
        cls.model_fields = {**cls.model_fields, **cls.__annotations__}

    @classmethod
    def model_validate(cls: type[Kind], raw: Mapping[str, object], **_: object) -> Kind:
        """Make a model of the declared fields of a mapping."""
        made = cls()
        for name in cls.model_fields.keys() & raw.keys():
            value = raw[name]
            setattr(made, name, tuple(value) if isinstance(value, list) else value)
        return made


class UncheckedType:
    """Takes whatever pydantic's markers and adapters of types are made with, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def validate_python(self, value: object) -> object:
        """Return a value as it is."""
        return value


class NeverRaisedError(Exception):
    """Nothing is checked, so nothing is refused."""


def _unchanged(**_: object) -> Callable[[Any], Any]:
    return lambda method: method


def _stand_in(name: str, contents: Mapping[str, object]) -> ModuleType:
    module = ModuleType(name, doc=__doc__)
    vars(module).update(contents)
    return module


def _lend_pydantic() -> bool:
    """Put the stand-ins in the place of pydantic if it is not installed; tell whether."""
    try:
        import_module("pydantic")
    except ModuleNotFoundError:
        pass
    else:
        return False
    types = dict.fromkeys(
        ("AfterValidator", "BeforeValidator", "ConfigDict", "Field", "TypeAdapter"), UncheckedType
    )
    sys.modules["pydantic"] = _stand_in(
        "pydantic",
        {
            **types, "BaseModel": UncheckedModel, "StrictBool": bool, "JsonValue": object,
            "ValidationError": NeverRaisedError, "model_validator": _unchanged,
            "create_model": lambda name, **_: type(name, (UncheckedModel,), {}),
        },
    )  # fmt: skip
    errors = dict.fromkeys(("ErrorDetails", "PydanticCustomError"), NeverRaisedError)
    sys.modules["pydantic_core"] = _stand_in("pydantic_core", errors)
    return True


PYDANTIC_IS_ABSENT = _lend_pydantic()
