"""One declaration of a setting gives its key, its check, its default and its value."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from vllm_omni.errors import ConfigError, UnsupportedParallelismError
from vllm_omni.other_keys import no_effect, refused
from vllm_omni.setting import (
    Setting,
    Status,
    check_fields,
    construct,
    names,
    no_effect_notes,
    setting,
    settings_of,
    values_of,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@dataclass(frozen=True)
class Owner:
    plain: str
    count: Annotated[int, Field(ge=1), setting("how many", "--count -c")] = 3
    mode: Annotated[Literal["a", "b"] | None, setting("which", key="section.")] = None
    renamed: Annotated[float, setting("how far", key="section.distance", unsaid="near")] = 0.5
    word: Annotated[str, names(("red", "blue"), {"rouge": "red"}), setting("colour")] = "blue"
    free: Annotated[dict[str, int], setting("anything", secret=True)] = field(default_factory=dict)


def by_key():
    return {one.key: one for _, one in settings_of(Owner)}


def test_keys_defaults_and_flags_follow_from_the_field():
    found = by_key()
    assert list(found) == ["count", "section.mode", "section.distance", "word", "free"]
    assert [one.default for one in found.values()] == [3, None, 0.5, "blue", None]
    assert found["count"].flags == ("--count", "-c")
    assert (found["section.distance"].section, found["section.distance"].name) == (
        "section.", "distance",
    )  # fmt: skip
    assert [one.is_open for one in found.values()] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("key", "kind", "words", "type_words", "default_words"),
    [
        ("count", int, (), "int", "3"),
        ("section.mode", str, ("a", "b"), "a, b", ""),
        ("section.distance", float, (), "number", "near"),
        ("word", str, ("red", "blue"), "red, blue", "blue"),
        ("free", dict, (), "mapping", ""),
    ],
)
def test_what_a_reader_is_told(key, kind, words, type_words, default_words):
    one = by_key()[key]
    assert (one.kind, one.words, one.type_words) == (kind, words, type_words)
    assert one.default_words == default_words


def test_words_of_other_defaults():
    def told(default):
        return Setting("k", object, "h", default).default_words

    assert [told(value) for value in (300.0, False, True, (), None, 7)] == [
        "300", "false", "true", "", "", "7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", 0, "NAME: must be at least 1, got 0"),
        ("count", True, "NAME: must be an integer, got true"),
        ("section.mode", "c", 'NAME: must be a or b, got "c"'),
        ("word", "green", 'NAME: must be red or blue, got "green"'),
        ("word", 3, "NAME: must be a string, got 3"),
        ("free", {"x": "hf_secret"}, "NAME.x: must be an integer, got ***"),
        ("free", "hf_secret", "NAME: must be a mapping of names to values, got ***"),
    ],
)
def test_a_wrong_value(key, value, message):
    with pytest.raises(ConfigError) as error:
        by_key()[key].checked(value, "NAME")
    assert str(error.value) == message


def test_a_reader_who_knows_the_name_is_not_told_it():
    with pytest.raises(ConfigError, match=r"^must be at least 1, got 0$"):
        by_key()["count"].checked(0, "")


def test_other_words_and_other_case():
    assert [by_key()["word"].checked(word, "w") for word in ("RED", "Rouge", "blue")] == [
        "red", "red", "blue",
    ]  # fmt: skip


def test_an_owner_is_made_from_keys():
    made = construct(
        Owner,
        {"section.mode": "b", "count": None, "free.x": 1, "free.y": 2, "unknown": 3},
        plain="p",
    )
    assert made == Owner("p", mode="b", free={"x": 1, "y": 2})
    assert {one.key: value for one, value in values_of(made)} == {
        "count": 3, "section.mode": "b", "section.distance": 0.5, "word": "blue",
        "free": {"x": 1, "y": 2},
    }  # fmt: skip


def test_an_object_that_was_made_by_hand_is_checked_by_the_same_rules():
    check_fields(Owner("p"))
    with pytest.raises(ConfigError, match=r"^count: must be at least 1, got -1$"):
        check_fields(Owner("p", count=-1))
    with pytest.raises(ConfigError, match=r"^--count: must be at least 1, got -1$"):
        check_fields(Owner("p", count=-1), by_flag=True)


def test_refused_keys():
    tiling = refused("vae_tiling", bool, "it changes pixels", [False], flags="own --tile")
    assert (tiling.status, tiling.flags) == (Status.REFUSED, ("--vae-tiling", "--tile"))
    tiling.refuse(value=False, name="x")
    with pytest.raises(ConfigError, match=r"^x=true is refused: it changes pixels$"):
        tiling.refuse(value=True, name="x")
    with pytest.raises(UnsupportedParallelismError, match="ring=2 is refused"):
        refused("parallel_config.ring", int, "no ring", [1]).refuse(2, "ring")


def test_keys_without_effect_are_noted():
    known = {"a": no_effect("a", int, "nobody reads it", [1]), "b": refused("b", int, "no", [1])}
    assert no_effect_notes({"a": 1, "b": 1, "c": 1}, known) == []
    assert no_effect_notes({"a": None}, known) == []
    assert no_effect_notes({"a": 2}, known) == ["a=2 has no effect: nobody reads it"]
