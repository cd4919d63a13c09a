"""Messages of the WebSocket protocol: what is accepted, refused, and with which words."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.client.address import parsed
from vllm_omni.entrypoints.server import protocol
from vllm_omni.errors import EventConflictError, InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

IMAGE = {"image_url": "data:image/png;base64,AAAA"}


def control(**message: object) -> protocol.ControlMessage:
    return protocol.parse_control(json.dumps(message))


def interact(interaction: object) -> protocol.Interaction:
    parsed = control(type="session.interaction", interaction=interaction)
    assert isinstance(parsed, protocol.SessionInteraction)
    return parsed.interaction


def test_importing_protocol_and_media_loads_no_torch():
    code = (
        "import sys; import vllm_omni.entrypoints.server.protocol, "
        "vllm_omni.outputs.media; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestFraming:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "not valid JSON"),
            ("{", "not valid JSON"),
            ("[" * 200_000, "not valid JSON"),
            ('{"type": NaN}', "NaN is not a JSON number"),
            ('{"type": 1' + "0" * 5000 + "}", "not valid JSON"),
            ("[]", "must be a JSON object, got list"),
            ("null", "must be a JSON object, got NoneType"),
            ('{"type": []}', "Unknown message type"),
            ("{}", "Unknown message type None"),
            ('{"type": "session.start"}', "Unknown message type 'session.start'"),
            ('{"type": "dance"}', "expected one of session.ping, session.stop"),
        ],
    )
    def test_bad_control_text_is_refused(self, text, words):
        if len(text) > protocol.MAX_CONTROL_CHARS:
            words = "at most 131072"
        with pytest.raises(InvalidRequestError, match=words):
            protocol.parse_control(text)

    def test_deep_nesting_is_refused(self):
        with pytest.raises(InvalidRequestError):
            protocol.parse_control("[" * 100_000)

    def test_limits_count_characters(self):
        frame = '{"type":"session.ping","pad":"%s"}'
        room = protocol.MAX_CONTROL_CHARS - len(frame % "")
        assert protocol.parse_control(frame % ("ü" * room)) == protocol.SessionPing()
        with pytest.raises(InvalidRequestError, match="131073 characters, at most 131072"):
            protocol.parse_control(frame % ("x" * (room + 1)))

    def test_a_start_message_has_its_own_limit(self):
        url = {"image_url": "x" * protocol.MAX_START_CHARS}
        message = {"type": "session.start", "prompt": "a", "image_reference": url}
        text = json.dumps(message)
        with pytest.raises(InvalidRequestError, match="at most 4194304"):
            protocol.parse_start(text)
        assert protocol.parse_start(text.replace("x" * 200, "", 1)).prompt

    def test_the_first_message_must_be_a_start(self):
        with pytest.raises(InvalidRequestError, match="type: the first message must be"):
            protocol.parse_start('{"type":"session.ping"}')

    @given(st.text(max_size=200))
    def test_any_text_parses_or_is_refused(self, text):
        for parse in (protocol.parse_start, protocol.parse_control):
            with pytest.raises(InvalidRequestError):
                parse(text)


class TestInteraction:
    @pytest.mark.parametrize(
        ("interaction", "words"),
        [
            (None, "interaction: must be a mapping"),
            ([], "interaction: must be a mapping"),
            ({"event_id": "", "event": []}, "interaction.event_id"),
            ({"event_id": 7, "event": {}}, "interaction.event_id: must be a string, got 7"),
            ({}, "interaction.event: is required"),
            ({"event": ["x"]}, "interaction.event: must be a mapping"),
            ({"event": {}}, "needs a prompt or multi_modal_data"),
            ({"event": {"prompt": "", "multi_modal_data": {}}}, "needs a prompt or"),
            ({"event": {"prompt": 5, "multi_modal_data": 5}}, "event.prompt: must be a string"),
            ({"event": {"prompt": " \n"}}, "event.prompt: must not be blank"),
            ({"event": {"multi_modal_data": [1], "negative_prompt": "n"}}, "multi_modal_data"),
            ({"event": {"multi_modal_data": {"camera": [1]}}}, "camera: must be a mapping"),
            ({"event": {"prompt": "x", "negative_prompt": "n"}, "transition_chunks": -1},
             "negative_prompt: must be absent or null"),
            ({"event": {"prompt": "x"}, "transition_chunks": "2"}, "transition_chunks: must be"),
            ({"event": {"prompt": "x"}, "transition_chunks": 2.9}, "an integer, got 2.9"),
            ({"event": {"prompt": "x"}, "transition_chunks": True}, "an integer, got true"),
            ({"event": {"prompt": "x"}, "transition_chunks": -1}, "at least 0, got -1"),
        ],
    )  # fmt: skip
    def test_the_first_failure_in_order_names_its_field(self, interaction, words):
        with pytest.raises(InvalidRequestError, match=words):
            interact(interaction)

    @pytest.mark.parametrize(("given_", "parsed"), [(None, None), (0, 0), (2.0, 2), (3, 3)])
    def test_integral_transition_chunks(self, given_, parsed):
        got = interact({"event": {"prompt": "x"}, "transition_chunks": given_})
        assert got.transition_chunks == parsed
        assert got.transition_chunks is None or type(got.transition_chunks) is int

    def test_absent_and_null_event_ids_are_left_to_the_server(self):
        assert interact({"event": {"prompt": "x"}}).event_id is None
        assert interact({"event_id": None, "event": {"prompt": "x"}}).event_id is None

    def test_extra_keys_of_an_event_are_kept(self):
        event = interact(
            {"event": {"multi_modal_data": {"camera": {"mode": "odd"}}, "weight": [1, 2]}}
        ).event
        assert event.multi_modal_data == {"camera": {"mode": "odd"}}
        assert event.model_extra == {"weight": [1, 2]}

    def test_a_prompt_and_an_empty_table_are_a_prompt_event(self):
        assert interact({"event": {"prompt": "x", "multi_modal_data": {}}}).event.prompt == "x"


class TestOtherControls:
    def test_ping_and_stop_ignore_unknown_fields(self):
        assert control(type="session.ping", t=1) == protocol.SessionPing()
        assert control(type="session.stop", t=1) == protocol.SessionStop()

    def test_reset(self):
        assert control(type="session.reset") == protocol.SessionReset()
        full = control(type="session.reset", prompt="p", image_reference=IMAGE, seed=-5)
        assert full == protocol.SessionReset(
            prompt="p", image_reference=protocol.ImageReference(**IMAGE), seed=-5
        )

    @pytest.mark.parametrize(
        ("field", "value"),
        [("prompt", " "), ("seed", 2**63), ("seed", True), ("image_reference", [IMAGE])],
    )
    def test_reset_names_its_bad_field(self, field, value):
        with pytest.raises(InvalidRequestError) as caught:
            control(type="session.reset", **{field: value})
        assert caught.value.field == field


class TestServerMessages:
    def test_optional_fields_stay_off_the_wire_and_null_indices_stay_on_it(self):
        trailer = protocol.VideoChunkMetadata(
            request_id="r", kind="trailer", num_frames=0, byte_length=5,
            generation_chunk_index=None, transport_chunk_index=3,
        )  # fmt: skip
        assert json.loads(trailer.to_text()) == {
            "type": "video.chunk_metadata", "request_id": "r", "kind": "trailer",
            "num_frames": 0, "byte_length": 5, "generation_chunk_index": None,
            "started_event_ids": [], "active_event_ids": [], "completed_event_ids": [],
            "transport_chunk_index": 3,
        }  # fmt: skip

    def test_additions_appear_when_set(self):
        media = protocol.VideoChunkMetadata(
            request_id="r", num_frames=9, byte_length=5, generation_chunk_index=0,
            transport_chunk_index=0, server_ready_ms=1.5, applied={"e": 4},
        )  # fmt: skip
        sent = json.loads(media.to_text())
        assert sent["server_ready_ms"] == 1.5
        assert sent["applied"] == {"e": 4}

    def test_an_error_carries_its_code_and_ids(self):
        error = EventConflictError("seen before", field="interaction.event_id")
        sent = json.loads(protocol.ErrorMessage.of(error, request_id="r", event_id="e").to_text())
        assert sent == {
            "type": "error", "message": "interaction.event_id: seen before",
            "code": "event_id_conflict", "request_id": "r", "event_id": "e",
        }  # fmt: skip
        bare = protocol.ErrorMessage(message="m")
        assert json.loads(bare.to_text()) == {"type": "error", "message": "m"}

    @pytest.mark.parametrize(
        "message",
        [
            protocol.SessionQueued(request_id="r", position=1),
            protocol.VideoStart(request_id="r", config={"prompt": "x", "seed": 1}),
            protocol.SessionInteractionQueued(request_id="r", event_id="e"),
            protocol.SessionResetDone(request_id="r"),
            protocol.SessionPong(),
            protocol.SessionDone(request_id="r", chunks=2, stopped=True),
            protocol.ErrorMessage(message="m", code="server_full"),
        ],
    )
    def test_a_client_reads_back_what_the_server_wrote(self, message):
        assert parsed(message.to_text()) == message


def test_the_schema_describes_every_message_by_its_type():
    definitions = protocol.protocol_schema()["$defs"]
    for model in protocol.CLIENT_MESSAGES + protocol.SERVER_MESSAGES:
        shape = definitions[model.__name__]
        assert shape["properties"]["type"]["const"] == protocol.type_of(model)
        assert "type" in shape["required"]
        assert shape["description"] == model.__doc__.replace("\n    ", "\n")
    assert len(definitions["ClientMessage"]["oneOf"]) == len(protocol.CLIENT_MESSAGES)
    assert definitions["Interaction"]["properties"]["transition_chunks"]["anyOf"][0] == {
        "maximum": 1_000_000, "minimum": 0, "type": "integer",
    }  # fmt: skip
