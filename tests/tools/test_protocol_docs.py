"""The protocol's reference pages are those that the message classes give."""

import pytest

from vllm_omni.entrypoints.server import protocol
from vllm_omni.tools import protocol_docs

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def test_the_committed_reference_is_up_to_date():
    assert protocol_docs.main(["--check"]) == 0


def test_a_stale_reference_is_noticed_and_rewritten(tmp_path, capsys):
    directory = ["--directory", str(tmp_path)]
    assert protocol_docs.main([*directory, "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert protocol_docs.main(directory) == 0
    assert protocol_docs.main([*directory, "--check"]) == 0
    page = tmp_path / protocol_docs.PAGE_FILE
    page.write_text(page.read_text().replace("session.ping", "session.pink"))
    assert protocol_docs.main([*directory, "--check"]) == 1
    assert "websocket_protocol.md is out of date" in capsys.readouterr().out


def test_the_page_has_a_section_for_each_message():
    page = protocol_docs.page_text()
    for model in protocol.CLIENT_MESSAGES + protocol.SERVER_MESSAGES:
        assert f"### `{protocol.type_of(model)}`" in page
