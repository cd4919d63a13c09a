"""Devices are counted from lists and device nodes, without a device library."""

from dataclasses import replace

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni import envs
from vllm_omni.config import devices
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.fixture
def dev(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "DEV", tmp_path)
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,-1,3")
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
    assert envs.detect_platform() == platform


@pytest.mark.usefixtures("dev")
def test_too_few_devices_names_both_numbers():
    pair = OmniDiffusionConfig(
        model="m", device="cuda", executor="mp", parallel=DiffusionParallelConfig(ulysses_degree=2)
    )
    devices.check_devices(pair, visible=2)
    devices.check_devices(pair, visible=None)
    with pytest.raises(ConfigError, match=r"2 ranks .* need 2 devices, but devices='7' shows 1"):
        devices.check_devices(replace(pair, devices="7"), visible=1)


@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize("listed", ["1,0", "0,0", "0,,1", "0,x", "", "0,2,1"])
def test_a_list_that_does_not_rise_would_lose_npus(listed):
    with pytest.raises(ConfigError, match="rising numbers such as '0,1,2,3', got"):
        devices.device_names("npu", listed, {})


@pytest.mark.usefixtures("dev")
def test_without_a_variable_the_list_is_what_the_library_gets():
    assert devices.device_names("npu", "0, 2,10", {}) == "0,2,10"
    assert devices.device_names("cuda", "1,0", {}) == "1,0"
    assert devices.device_names("cuda", None, {}) is None
    assert devices.device_names("cpu", "7", {}) == "7"


@pytest.mark.usefixtures("dev")
@pytest.mark.parametrize(
    ("allowed", "listed", "names"),
    [
        ("4,5,6,7", "0,1,2,3", "4,5,6,7"),
        ("4, 5,6,7", "3,0", "7,4"),
        ("GPU-aa,GPU-bb", "1", "GPU-bb"),
        ("MIG-aa,3", "0", "MIG-aa"),
        ("4,5", "GPU-aa,1", "GPU-aa,5"),
        ("4,5", "MIG-GPU-aa/1/2", "MIG-GPU-aa/1/2"),
    ],
)
def test_numbers_count_the_entries_of_the_operators_variable(monkeypatch, allowed, listed, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert devices.device_names("cuda", listed, {}) == names


@pytest.mark.parametrize(("allowed", "beyond"), [("4,5", "2"), ("4,-1,6", "2"), ("", "2")])
def test_a_number_beyond_the_variable_is_refused_with_both_lists(monkeypatch, allowed, beyond):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    message = rf"devices='0,2' counts .* CUDA_VISIBLE_DEVICES='{allowed}' .* no entry .*{beyond};"
    with pytest.raises(ConfigError, match=message):
        devices.device_names("cuda", "0,2", {})


def test_the_variable_of_the_workers_stands_over_that_of_the_server(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    workers = {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}
    assert devices.device_names("npu", "0,1", workers) == "4,6"
    assert devices.visible_device_count("npu", None, {"ASCEND_RT_VISIBLE_DEVICES": "4"}) == 1
    with pytest.raises(ConfigError, match="must be rising numbers such as '0,1,2,3', got '6,4'"):
        devices.device_names("npu", "1,0", workers)


@pytest.mark.parametrize("listed", [None, "0"])
def test_replicas_whose_devices_nobody_listed_are_counted_on_the_machine(dev, tmp_path, listed):
    model = str(write_fake_checkpoint(tmp_path / "model"))
    settings = {"omni_dp_size_local": 4, "devices": listed}
    for number in range(3):
        (dev / f"nvidia{number}").touch()
    with pytest.raises(ConfigError, match=r"4 ranks .*4 replicas.*but this process shows 3"):
        resolve(model, overrides=settings, platform="cuda", executor="mp")
    (dev / "nvidia3").touch()
    config = resolve(model, overrides=settings, platform="cuda", executor="mp").config
    assert config.replicas.devices == ("0", "1", "2", "3")
    # Four from number 2 on are more than there are.
    settings["devices"] = "2"
    with pytest.raises(ConfigError, match=r"need 4 devices from number 2 on, .* shows 4"):
        resolve(model, overrides=settings, platform="cuda", executor="mp")
    # A list of all stands over the nodes, whose names may be others.
    settings["devices"] = "4,5,6,7"
    assert resolve(model, overrides=settings, platform="cuda", executor="mp").config
