"""Whatever pydantic refuses is said in one dialect, with the bound and with what was got."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_omni.wording import one_of, problems, refuse, shown

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


class Inner(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    side: Annotated[int, Field(ge=16, le=4096, multiple_of=16)] = 16


class Outer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    count: int | None = None
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    on: bool = False
    name: Annotated[str, Field(min_length=1, max_length=4)] = "a"
    size: Annotated[str, Field(pattern=r"^\d+x\d+$")] = "1x1"
    mode: Literal["off", "exact", "fused"] = "off"
    only: Literal[4] = 4
    nothing: None = None
    inner: Inner = Inner()
    table: dict[str, int] = {}
    tags: Annotated[list[int], Field(min_length=1)] = [1]
    items: Annotated[list[int], Field(min_length=2, max_length=3)] = [1, 2]

    @field_validator("name")
    @classmethod
    def _not_blank(cls, value):
        if not value.strip():
            raise refuse("must not be blank")
        return value

    @model_validator(mode="after")
    def _all(self):
        if self.count == 13:
            raise ValueError("count 13 and mode off do not go together")
        return self


class Loose(BaseModel):
    count: int = 0
    share: float = 0.0
    on: bool = False


def found(model, values):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    return problems(caught.value)


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ({"count": "1"}, "count", 'must be an integer, got "1"'),
        ({"count": True}, "count", "must be an integer, got true"),
        ({"count": 1.5}, "count", "must be an integer, got 1.5"),
        ({"share": "x"}, "share", 'must be a number, got "x"'),
        ({"share": float("nan")}, "share", "must be a finite number, got NaN"),
        ({"share": 0}, "share", "must be above 0, got 0"),
        ({"share": 1.0}, "share", "must be below 1, got 1.0"),
        ({"on": "yes"}, "on", 'must be true or false, got "yes"'),
        ({"name": 3}, "name", "must be a string, got 3"),
        ({"name": ""}, "name", 'must not be empty, got ""'),
        ({"name": "abcde"}, "name", 'must have at most 4 characters, got "abcde"'),
        ({"name": " "}, "name", 'must not be blank, got " "'),
        ({"name": "\ud800"}, "name", 'must be text that UTF-8 can encode, got "\\ud800"'),
        ({"size": "10x"}, "size", 'has the wrong form, got "10x"'),
        ({"mode": "on"}, "mode", 'must be off, exact or fused, got "on"'),
        ({"only": 5}, "only", "must be 4, got 5"),
        ({"nothing": 1}, "nothing", "must be absent or null, got 1"),
        ({"inner": 1}, "inner", "must be a mapping of names to values, got 1"),
        ({"inner": {"side": 0}}, "inner.side", "must be at least 16, got 0"),
        ({"inner": {"side": 4112}}, "inner.side", "must be at most 4096, got 4112"),
        ({"inner": {"side": 20}}, "inner.side", "must be a multiple of 16, got 20"),
        ({"inner": {"sides": 20}}, "inner.sides", "is unknown"),
        ({"table": []}, "table", "must be a mapping of names to values, got []"),
        ({"items": 1}, "items", "must be a list, got 1"),
        ({"items": []}, "items", "must have at least 2 items, got []"),
        ({"tags": []}, "tags", "must not be empty, got []"),
        ({"items": [1]}, "items", "must have at least 2 items, got [1]"),
        ({"items": [1, 2, 3, 4]}, "items", "must have at most 3 items, got [1, 2, 3, 4]"),
        ({"items": [1, "a"]}, "items.1", 'must be an integer, got "a"'),
        ({"count": 13}, "", "count 13 and mode off do not go together"),
        (3, "", "must be a mapping of names to values, got 3"),
    ],
)
def test_the_text_of_each_kind_of_problem(values, name, text):
    (problem,) = found(Outer, values)
    assert (problem.name, problem.text) == (name, text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"count": "x"}, 'must be an integer, got "x"'),
        ({"count": 1.5}, "must be an integer without a fraction, got 1.5"),
        ({"share": "x"}, 'must be a number, got "x"'),
        ({"on": "maybe"}, 'must be true or false, got "maybe"'),
    ],
)
def test_values_that_come_as_text(values, text):
    assert found(Loose, values)[0].text == text


def test_a_missing_value_has_no_got():
    class Needs(BaseModel):
        prompt: str

    assert [(one.name, one.text) for one in found(Needs, {})] == [("prompt", "is required")]


def test_all_problems_come_in_the_order_of_declaration():
    assert [one.name for one in found(Outer, {"only": 5, "count": "x"})] == ["count", "only"]


def test_a_long_value_is_shortened_and_stays_one_line():
    assert shown("a\n" + "b" * 1000) == json.dumps("a\n" + "b" * 1000)[:80] + "..."
    assert shown(object).startswith("\"<class 'object'>")


def test_what_json_cannot_say_is_shown_by_its_type():
    circle = []
    circle.append(circle)
    assert shown(circle) == "a value of type list"
    assert shown(10**5000) == "a value of type int"
    assert shown({(1, 2): 3}) == "a value of type dict"


def test_a_list_of_names():
    assert (one_of(["a"]), one_of("ab"), one_of((1, 2, 3))) == ("a", "a or b", "1, 2 or 3")
