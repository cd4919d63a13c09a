"""Devices are counted from lists and device nodes, without a device library."""

import pytest

from vllm_omni.config import devices
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def dev(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.usefixtures("dev")
def test_a_cpu_has_no_limit():
    assert devices.visible_device_count("cpu", "0") is None


def test_the_list_stands_over_the_environment_and_that_over_the_nodes(dev, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert devices.visible_device_count("cuda", None) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices.visible_device_count("cuda", None) == 2
    assert devices.visible_device_count("cuda", "GPU-a") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.visible_device_count("cuda", None) == 0


@pytest.mark.usefixtures("dev")
def test_without_nodes_nothing_is_known():
    assert devices.visible_device_count("npu", None) is None


@pytest.mark.parametrize(
    ("nodes", "platform"),
    [(["nvidia0"], "cuda"), (["davinci0", "davinci_manager"], "npu"),
     (["davinci_manager", "nvidiactl"], "cpu"), ([], "cpu")],
)  # fmt: skip
def test_the_platform_of_a_machine(dev, nodes, platform):
    for name in nodes:
        (dev / name).touch()
    assert devices.detect_platform() == platform


def test_too_few_devices_names_both_numbers():
    devices.check_device_count(ranks=2, visible=2, devices=None)
    devices.check_device_count(ranks=2, visible=None, devices=None)
    with pytest.raises(ConfigError, match=r"2 ranks .* need 2 devices, but devices='7' shows 1"):
        devices.check_device_count(ranks=2, visible=1, devices="7")


@pytest.mark.parametrize("listed", ["1,0", "0,0", "0,,1", "0,x", "", "0,2,1"])
def test_a_list_that_does_not_rise_would_lose_npus(listed):
    with pytest.raises(ConfigError, match="rising numbers such as '0,1,2,3', got"):
        devices.visible_device_count("npu", listed)


def test_a_list_that_rises_is_counted():
    assert devices.visible_device_count("npu", "0, 2,10") == 3
    assert devices.visible_device_count("cuda", "1,0") == 2
