"""The guarded state machine of the server's side of a socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.entrypoints.server import protocol
from vllm_omni.entrypoints.server.channel import (
    BINARY,
    READABLE,
    WRITABLE,
    ReadState,
    SocketState,
    SocketStateError,
    WriteState,
)
from vllm_omni.errors import InvalidRequestError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

FROM_CLIENT = [protocol.type_of(model) for model in protocol.CLIENT_MESSAGES]
FROM_SERVER = [protocol.type_of(model) for model in protocol.SERVER_MESSAGES] + [BINARY]


def streaming() -> SocketState:
    state = SocketState()
    state.received("session.start")
    state.sending("video.start")
    return state


def test_the_tables_name_exactly_the_messages_of_the_protocol():
    assert set().union(*READABLE.values()) == set(FROM_CLIENT)
    assert set().union(*WRITABLE.values()) == set(FROM_SERVER)


def test_a_whole_session():
    state = SocketState()
    state.received("session.start")
    for message in ("session.queued", "session.queued", "session.pong", "video.start"):
        state.sending(message)
    state.received("session.interaction")
    for message in ("session.interaction.queued", "video.chunk_metadata", BINARY):
        state.sending(message)
    state.received("session.reset")
    state.sending("session.reset.done")
    state.received("session.stop")
    state.received("session.ping")
    for message in ("session.pong", "session.done"):
        state.sending(message)
    assert state.ended
    assert (state.reading, state.writing) == (ReadState.ENDED, WriteState.ENDED)


def test_nothing_comes_between_metadata_and_its_bytes():
    state = streaming()
    state.sending("video.chunk_metadata")
    for message in set(FROM_SERVER) - {BINARY}:
        with pytest.raises(SocketStateError, match=f"expected binary; got {message}"):
            state.sending(message)
    state.sending(BINARY)
    assert state.writing is WriteState.STREAMING


def test_bytes_need_metadata():
    with pytest.raises(SocketStateError, match="got binary"):
        streaming().sending(BINARY)


@pytest.mark.parametrize("message", ["session.interaction", "session.reset"])
def test_steering_waits_for_the_video_and_ends_with_a_stop(message):
    state = SocketState()
    with pytest.raises(InvalidRequestError, match=r"expected session\.start; got"):
        state.received(message)
    state.received("session.start")
    with pytest.raises(InvalidRequestError, match="wait_video"):
        state.received(message)
    state.sending("video.start")
    state.received(message)
    state.received("session.stop")
    with pytest.raises(InvalidRequestError, match="stopping"):
        state.received(message)


def test_a_stop_while_waiting_stays_a_stop():
    state = SocketState()
    state.received("session.start")
    state.received("session.stop")
    state.sending("session.done")
    assert state.ended


def test_end_from_any_state():
    for state in (SocketState(), streaming()):
        state.end()
        with pytest.raises(InvalidRequestError, match="nothing: the session has ended"):
            state.received("session.ping")
        with pytest.raises(SocketStateError, match="nothing: the session has ended"):
            state.sending("error")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("received"), st.sampled_from([*FROM_CLIENT, "other"])),
        st.tuples(st.just("sending"), st.sampled_from([*FROM_SERVER, "other"])),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_refused_message_changes_nothing_and_an_accepted_one_is_in_the_table(steps):
    state = SocketState()
    for side, message in steps:
        before = (state.reading, state.writing)
        legal = READABLE[before[0]] if side == "received" else WRITABLE[before[1]]
        act = state.received if side == "received" else state.sending
        if message in legal:
            act(message)
        else:
            with pytest.raises((InvalidRequestError, SocketStateError)):
                act(message)
            assert (state.reading, state.writing) == before
        assert (state.reading is ReadState.ENDED) == state.ended
