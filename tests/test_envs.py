"""Variables of the environment are read as every other tool reads them, and wrong ones named."""

import threading

import pytest

from vllm_omni import envs
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults():
    assert [variable() for variable in envs.VARIABLES] == [
        None, None, None, None, True, 600, None,
    ]  # fmt: skip
    envs.check()


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
def test_empty_counts_as_not_set(variable, monkeypatch):
    monkeypatch.setenv(variable.name, " ")
    assert variable() == variable.default


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", False), ("false", False), ("FALSE", False), ("no", False), ("No", False),
        ("off", False), ("OFF", False), ("1", True), ("true", True), ("True", True),
        ("yes", True), ("YES", True), ("on", True), (" on ", True),
    ],
)  # fmt: skip
def test_booleans(text, value, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", text)
    assert envs.media_url_allow_redirects() is value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "1e3", "²"])
def test_counts_that_are_none(text, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_VIDEO_SYNC_TIMEOUT", text)
    needed = "VLLM_OMNI_VIDEO_SYNC_TIMEOUT: must be an integer of at least 1, got "
    with pytest.raises(ConfigError, match=needed):
        envs.video_sync_timeout_s()


def test_values_are_read_when_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "599")
    assert envs.max_image_pixels() == 599
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "600")
    assert envs.max_image_pixels() == 600


def test_all_that_is_wrong_is_named_at_once(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "0")
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "maybe")
    monkeypatch.setenv("VLLM_API_KEY", "anything goes")
    with pytest.raises(ConfigError) as error:
        envs.check()
    assert str(error.value) == (
        "environment: VLLM_MAX_IMAGE_PIXELS: must be an integer of at least 1, got '0'; "
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS: must be 1, true, yes, on, 0, false, no or off in any "
        "case, got 'maybe'"
    )


def test_exported_variables_are_taken_back(monkeypatch):
    monkeypatch.setenv("LINGBOT_TEST_A", "before")
    with envs.exported({"LINGBOT_TEST_A": "x", "VLLM_MAX_IMAGE_PIXELS": "5"}):
        assert envs.max_image_pixels() == 5
    assert envs.max_image_pixels() is None


def test_one_thread_at_a_time_exports():
    name, entered, leave = "LINGBOT_TEST_B", threading.Event(), threading.Event()

    def export():
        with envs.exported({name: "theirs"}):
            entered.set()
            assert leave.wait(10)

    other = threading.Thread(target=export)
    with envs.exported({name: "ours"}):
        other.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    leave.set()
    other.join()
    assert envs.Variable(name, str, "unset", "")() == "unset"


def test_a_variable_that_was_removed_meanwhile_is_no_error(monkeypatch):
    with envs.exported({"LINGBOT_TEST_C": "x"}):
        monkeypatch.delenv("LINGBOT_TEST_C")
