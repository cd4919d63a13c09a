"""A client's JSON is bounded before it is parsed, whatever it consists of."""

import time

import pytest

from vllm_omni.entrypoints.server.protocol import MAX_START_CHARS, parse_start
from vllm_omni.entrypoints.server.video_form import start_of
from vllm_omni.errors import InvalidRequestError
from vllm_omni.inputs.checking import (
    MAX_JSON_VALUES,
    MAX_PROMPT_CHARS,
    MAX_SHORT_CHARS,
    require_few_values,
)

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

START = (
    '{"type":"session.start","prompt":"a road","width":96,"height":64,"num_frames":9,'
    '"image_reference":{"image_url":"data:,"}'
)
ROOM = MAX_START_CHARS - 1000
BOMBS = {
    "lists": '"extra_params":{"x":[' + "[]," * (ROOM // 3) + "[]]}",
    "objects": '"extra_params":{"x":[' + "{}," * (ROOM // 3) + "{}]}",
    "keys": '"extra_params":{' + ",".join(f'"{i}":1' for i in range(ROOM // 11)) + "}",
    "unknown fields": ",".join(f'"{i}":1' for i in range(ROOM // 11)),
    "numbers": '"extra_params":{"x":[' + "1," * (ROOM // 2) + "1]}",
    "a script": '"extra_params":{"camera_action_script":[' + '"w",' * (ROOM // 4) + '"w"]}',
    "nested lists": '"extra_params":{"x":' + "[" * (ROOM // 2) + "]" * (ROOM // 2) + "}",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_message_of_very_many_values_is_not_parsed(bomb):
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_JSON_VALUES} values"):
        parse_start(f"{START},{bomb}}}")


def test_the_bound_of_a_field_of_a_form_names_the_field():
    with pytest.raises(InvalidRequestError, match="extra_params: the JSON has more than"):
        start_of({"prompt": "a", "extra_params": "[" + "[]," * MAX_JSON_VALUES + "[]]"})


def test_the_bound_is_exact_over_slices():
    text = " " * (2**20 - 2) + "[" * 4 + " " * 2**20 + ","
    require_few_values(text, limit=5)
    with pytest.raises(InvalidRequestError):
        require_few_values(text, limit=4)


def test_a_script_of_two_hours_and_a_prompt_of_commas_pass():
    chunk = '[["w"],["w"],["w"]]'
    chunks = 2 * 3600 * 16 // 12
    script = ",".join([chunk] * chunks)
    start = parse_start(f'{START},"extra_params":{{"camera_action_script":[{script}]}}}}')
    assert len(start.extra_params["camera_action_script"]) == chunks
    prompt = "," * MAX_PROMPT_CHARS
    assert parse_start(START.replace("a road", prompt) + "}").prompt == prompt


def test_a_picture_of_four_megabytes_passes_in_no_time():
    picture = "data:image/png;base64," + "A" * (ROOM - 500)
    began = time.monotonic()
    start = parse_start(START.replace("data:,", picture) + "}")
    assert start.image_url == picture
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("prompt", MAX_PROMPT_CHARS),
        ("negative_prompt", MAX_PROMPT_CHARS),
        ("user", MAX_SHORT_CHARS),
        ("model", MAX_SHORT_CHARS),
        ("aspect_ratio", MAX_SHORT_CHARS),
    ],
)
def test_every_text_is_bounded(field, limit):
    assert start_of({"prompt": "a", field: "x" * limit})
    with pytest.raises(Exception, match=f"{field}: must have at most {limit} characters"):
        start_of({"prompt": "a", field: "x" * (limit + 1)})
