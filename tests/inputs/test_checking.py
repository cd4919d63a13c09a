"""The dialect of refusals: strict kinds, one text for each mistake, text that UTF-8 can hold."""

import numpy as np
import pytest
from pydantic import Field

from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import (
    Checked,
    Count,
    FlowShift,
    Fps,
    OutputType,
    Prompt,
    Seed,
    Text,
    renamed,
    require_text,
    validate,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


class Inner(Checked):
    name: Text | None = None


class Sample(Checked):
    seed: Seed | None = None
    fps: Fps | None = None
    shift: FlowShift | None = None
    prompt: Prompt = "a"
    chunks: Count | None = None
    kind: OutputType | None = None
    inner: Inner = Field(default_factory=Inner)
    queue: bool = False
    extra: dict[str, object] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"seed": True}, "seed: must be an integer, got true"),
        ({"seed": "5"}, 'seed: must be an integer, got "5"'),
        ({"seed": 1.0}, "seed: must be an integer, got 1.0"),
        ({"seed": 2**63}, "seed: must be at most 9223372036854775807, got 9223372036854775808"),
        ({"seed": 10**5000}, "seed: must be at most 9223372036854775807, got a value of type int"),
        ({"fps": False}, "fps: must be a number, got false"),
        ({"fps": 0.5}, "fps: must be at least 1, got 0.5"),
        ({"fps": 1001}, "fps: must be at most 1000, got 1001"),
        ({"fps": float("nan")}, "fps: must be a finite number, got NaN"),
        ({"shift": 0}, "shift: must be above 0, got 0"),
        ({"prompt": None}, "prompt: must be a string, got null"),
        ({"prompt": " \n"}, "prompt: must not be blank"),
        ({"prompt": "x" * 32_769}, "prompt: must have at most 32768 characters, got"),
        ({"chunks": 2.5}, "chunks: must be an integer, got 2.5"),
        ({"chunks": "2"}, 'chunks: must be an integer, got "2"'),
        ({"kind": "mp4"}, "kind: must be pil, np or latent, got \"mp4\""),
        ({"inner": 3}, "inner: must be a mapping of names to values, got 3"),
        ({"inner": {"name": ""}}, 'inner.name: must not be empty, got ""'),
        ({"inner": {"nam": "a"}}, "inner: unknown key 'nam'; did you mean 'name'?"),
        ({"queue": 1}, "queue: must be true or false, got 1"),
        ({"sede": 1}, "unknown key 'sede'; did you mean 'seed'?"),
        ({"volume": 1}, "unknown key 'volume'; known are chunks, extra, fps, "),
    ],
)  # fmt: skip
def test_the_words_of_a_refusal(raw, text):
    with pytest.raises(InvalidRequestError) as caught:
        validate(Sample, raw)
    assert str(caught.value).startswith(text)
    assert caught.value.code == "invalid_request"
    head = text.partition(": ")[0]
    assert caught.value.field == (None if head.startswith("unknown") else head)


def test_of_several_faults_the_first_declared_is_told():
    with pytest.raises(InvalidRequestError, match=r"^seed: "):
        validate(Sample, {"fps": True, "seed": True})


def test_numbers_of_numpy_are_numbers():
    assert validate(Sample, {"seed": np.int64(5), "fps": np.float32(16)}).fps == 16.0
    with pytest.raises(InvalidRequestError):
        validate(Sample, {"seed": np.True_})


@pytest.mark.parametrize(("given", "seed"), [("21", 21), ("-3", -3), (21.0, 21), ("2e1", 20)])
def test_numbers_may_be_written(given, seed):
    assert validate(Sample, {"seed": given}, written=True).seed == seed


@pytest.mark.parametrize("given", [True, "many", "", "1_000", "\u0663", "nan", "0x10", "9" * 40])
def test_what_is_no_written_number(given):
    with pytest.raises(InvalidRequestError, match=r"^fps: must be a number, got "):
        validate(Sample, {"fps": given}, written=True)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"prompt": "a\ud83d"}, "prompt"),
        ({"extra": {"a": {"b": ["x", "\udc00"]}}}, "extra.a.b"),
        ({"extra": {"a": {"\ud83d": 1}}}, "extra.a"),
        ({"\ud83d": 1}, None),
    ],
)
def test_half_a_surrogate_pair_is_refused_anywhere(raw, field):
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair") as caught:
        validate(Sample, raw)
    assert caught.value.field == field
    assert str(caught.value).encode()


def test_whole_characters_pass_at_any_depth():
    nested: object = "\U0001f600"
    for _ in range(5000):
        nested = [nested]
    require_text({"a": nested})


def test_a_field_has_the_name_that_its_reader_knows():
    error = InvalidRequestError("must be text", field="extra_args.action_path")
    told = renamed(error, {"extra_args": "extra_params"})
    assert (str(told), told.field) == (
        "extra_params.action_path: must be text",
        "extra_params.action_path",
    )
    assert renamed(error, {"action_path": "x"}) is error
