"""What together cannot be honoured is refused before a worker starts; the rest gets its default."""

import os
from pathlib import Path

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.fixtures.deployments import model, no_setting_of_this_machine, real_size
from vllm_omni.config.resolve import resolve
from vllm_omni.config.stage import ENGINE_PATH
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.worker.process import prepare_environment
from vllm_omni.errors import CheckpointError, ConfigError, UnsupportedParallelismError

__all__ = ["model", "no_setting_of_this_machine", "real_size"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

PACKAGED = "lingbot_world_v2_stepwise.yaml"
CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "lingbot_world" / "configs"


def origin_of(resolved, key):
    return next(value.origin for value in resolved.origins if value.key == key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_size": 4}, "sequence_parallel_size is 4 but ulysses_degree is 1"),
        ({"sequence_parallel_size": 2, "ulysses_degree": 4}, "is 2 but ulysses_degree is 4"),
        ({"ring_degree": 2}, "ring_degree=2"),
        ({"allgather_degree": 2}, "allgather_degree=2"),
        ({"ulysses_mode": "advanced_uaa"}, 'ulysses_mode="advanced_uaa" is refused'),
        ({"ulysses_a2a_permute": True}, "ulysses_a2a_permute=true is refused: this model shares"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"cfg_parallel_size": 2}, "cfg_parallel_size=2"),
        ({"vae_patch_parallel_size": 2}, "vae_patch_parallel_size=2"),
        ({"use_hsdp": True}, "use_hsdp=true"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel=true"),
        ({"ulysses_degree": 3}, "40 attention heads cannot be split .* = 3 ranks"),
        ({"tensor_parallel_size": 4, "ulysses_degree": 4}, "40 attention heads .* = 16 ranks"),
        ({"ulysses_degree": 16}, "has 1560 tokens per latent frame, which ulysses_degree 16"),
    ],
)
def test_parallel_gates(real_size, options, message):
    with pytest.raises(UnsupportedParallelismError, match=message):
        resolve(
            real_size,
            deploy_config=PACKAGED,
            overrides={"parallel_config": options},
            platform="cuda",
            visible_devices=64,
        )


def test_more_ranks_than_devices(real_size, monkeypatch):
    overrides = {"ulysses_degree": 4, "distributed_executor_backend": "mp"}
    with pytest.raises(ConfigError, match=r"4 ranks .* need 4 devices, but devices='0,1' shows 2"):
        resolve(real_size, overrides=overrides | {"devices": "0,1"}, platform="cuda")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match="need 4 devices, but this process shows 3"):
        resolve(real_size, overrides=overrides, platform="npu")
    with pytest.raises(ConfigError, match="shows 1"):
        resolve(real_size, overrides=overrides, platform="npu", visible_devices=1)
    assert resolve(real_size, overrides=overrides, platform="cpu").config.parallel.world_size == 4


def test_the_workers_see_the_operators_devices_and_no_others(real_size, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    overrides = {"ulysses_degree": 4, "devices": "0,1,2,3"}
    resolved = resolve(real_size, overrides=overrides, platform="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # undone, whatever the worker sets
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    prepare_environment(resolved.config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    with pytest.raises(ConfigError, match="no entry 4;"):
        resolve(real_size, overrides=overrides | {"devices": "0,1,2,4"}, platform="cuda")


def test_several_ranks_take_worker_processes_and_never_one(model):
    assert resolve(model).config.executor == "inline"
    for executor in ("inline", "mp"):
        chosen = resolve(model, overrides={"ulysses_degree": 2}, executor=executor)
        assert chosen.config.executor == "mp"
    for name in ("uni", "inline"):
        with pytest.raises(ConfigError, match="set distributed_executor_backend to mp"):
            resolve(
                model,
                overrides={"ulysses_degree": 2, "distributed_executor_backend": name},
                executor="mp",
            )


def test_ray_is_asked_for_by_name_and_has_to_be_there(model, monkeypatch):
    monkeypatch.setattr("vllm_omni.config.stage.find_spec", lambda _: None)
    for key in ("worker_backend", "distributed_executor_backend"):
        with pytest.raises(ConfigError, match="needs Ray, which is not installed"):
            resolve(model, overrides={key: "ray"})
    assert resolve(model, overrides={"worker_backend": "multi_process"}).config.executor == "mp"


def test_ray_shares_out_the_devices_of_a_cluster(real_size, monkeypatch):
    monkeypatch.setattr("vllm_omni.config.stage.find_spec", lambda _: object())
    said = {"device": "cuda", "devices": "0,1", "ulysses_degree": 4, "num_replicas": 2}
    where = {"ray_address": "head:6379", "ray": {"placement": "spread", "resources": {"H200": 1}}}
    made = resolve(real_size, overrides=said | where | {"worker_backend": "ray"})
    assert (made.config.devices, made.config.of_replica(1).devices) == (None, None)
    assert made.no_effect == ("devices=0,1 has no effect: Ray gives each rank its device",)
    assert made.config.ray.address == "head:6379"
    assert (made.config.ray.placement, made.config.ray.resources) == ("spread", {"H200": 1})
    ignored = resolve(real_size, overrides=where)
    assert ignored.no_effect == (
        "ray_address and ray have no effect: distributed_executor_backend is not ray",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model_config": {"ar_diffusion_height": 100}},
            "ar_diffusion_height: must be a positive multiple of 16 pixels, got 100",
        ),
        ({"model_config": {"lingbot_action_root": "/no/such"}}, "'/no/such' is not a directory"),
        ({"default_sampling_params": {"0": {"num_frames": 10}}}, "9, 21, 33, 45"),
        ({"default_sampling_params": {"0": {"height": 64, "width": 100}}}, "got 100"),
        ({"default_sampling_params": {"0": {"generator_device": "cuda"}}}, "cpu or .* is cpu; got"),
        ({"engine_backend": "no.such.Engine"}, "cannot be imported"),
        ({"engine_backend": "pathlib.NoEngine"}, "cannot be imported"),
        ({"engine_backend": "word"}, "cannot be imported"),
    ],
)
def test_other_gates(model, overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve(model, overrides=overrides)


@pytest.mark.parametrize("backend", ["pathlib.Path", Path, 3])
def test_an_engine_of_another_kind(model, backend):
    with pytest.raises(TypeError, match="is not an engine of this package"):
        resolve(model, overrides={"engine_backend": backend})


def test_an_engine_class_is_known_by_its_name(model):
    engine = type("ARDiffusionEngine", (), {"__module__": ENGINE_PATH.rpartition(".")[0]})
    assert resolve(model, overrides={"engine_backend": engine}).engine_backend == "ar_diffusion"
    assert resolve(model, overrides={"engine_backend": "default"}).engine_backend == "default"


def test_size_without_and_with_the_chunk_engine(model):
    assert resolve(model).config.geometry is None
    assert resolve(model, overrides={"engine_backend": ENGINE_PATH}).config.geometry == (
        VideoGeometry(480, 832)
    )
    one_side = {"model_config": {"ar_diffusion_height": 240}}
    assert resolve(model, overrides=one_side).config.geometry == VideoGeometry(240, 832)


def test_the_environment_of_the_workers_is_shown_by_name_alone(model):
    resolved = resolve(model, overrides={"env": {"HF_TOKEN": "hf_secret", "THREADS": 4}})
    assert resolved.config.env == {"HF_TOKEN": "hf_secret", "THREADS": "4"}
    shown = [str(value) for value in resolved.origins if value.key.startswith("env.")]
    assert shown == [
        "env.HF_TOKEN = *** (keyword argument)", "env.THREADS = *** (keyword argument)",
    ]  # fmt: skip
    assert "hf_secret" not in f"{resolved!r}"


def test_the_action_root_of_the_environment(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_LINGBOT_ACTION_ROOT", str(tmp_path))
    resolved = resolve(model)
    assert resolved.config.action_root == str(tmp_path)
    assert origin_of(resolved, "model_config.lingbot_action_root") == "environment"


def test_quantisation_needs_the_linears_of_vllm(model, monkeypatch):
    monkeypatch.setattr("vllm_omni.config.stage.find_spec", lambda _: None)
    quantized = {"quantization_config": {"method": "fp8", "ignored_layers": ["a"]}}
    with pytest.raises(ConfigError, match="fp8 runs on vLLM's linears, and vLLM is not installed"):
        resolve(model, overrides=quantized)
    with pytest.raises(ConfigError, match="linear_backend vllm runs on vLLM's linears"):
        resolve(model, overrides={"linear_backend": "vllm"})
    with pytest.raises(ConfigError, match="fp8 needs linear_backend vllm, got native"):
        resolve(model, overrides=quantized | {"linear_backend": "native"})
    with pytest.raises(ConfigError, match="two quantisations"):
        resolve(model, overrides=quantized | {"model_config": {"lingbot_npu_quant": "w8a8"}})
    monkeypatch.setattr("vllm_omni.config.stage.find_spec", lambda _: object())
    config = resolve(model, overrides=quantized).config
    assert config.linear_backend == "vllm"
    assert config.quantization == {"method": "fp8", "ignored_layers": ("a",)}
    assert resolve(model, overrides={"quantization": "fp8"}).config.linear_backend == "vllm"


def test_compiling_is_for_cuda(model):
    asked = {"enforce_eager": False}
    assert resolve(model, platform="cuda").config.enforce_eager is False
    resolved = resolve(model, overrides=asked)
    assert resolved.config.enforce_eager is True
    assert any("enforce_eager=false has no effect" in note for note in resolved.no_effect)
    assert resolve(model).no_effect == ()


def test_the_list_of_devices_means_nothing_on_a_cpu(model):
    resolved = resolve(model, overrides={"devices": "0", "device": "cpu"}, platform="cuda")
    assert resolved.config.devices is None
    assert any("devices=0 has no effect" in note for note in resolved.no_effect)


def test_a_list_of_devices_is_not_run_on_a_cpu_that_nobody_asked_for(model):
    for devices, file in (("0", PACKAGED), ("0,1,2,3", CONFIGS / "npu_usp4_eager.yaml")):
        with pytest.raises(ConfigError, match="shows none") as refused:
            resolve(model, deploy_config=file, platform="cpu")
        for part in (f"devices='{devices}'", "/dev/nvidia*", "/dev/davinci*", "device: cpu"):
            assert part in str(refused.value)
    with pytest.raises(ConfigError, match="asks for GPUs or NPUs"):
        resolve(model, overrides={"devices": "0"}, platform="cpu")
    asked = resolve(model, deploy_config=PACKAGED, overrides={"device": "cpu"}, platform="cpu")
    assert asked.config.device == "cpu"


def test_the_model_comes_first_and_is_not_the_deploy_file(tmp_path):
    for blank in ("", "  "):
        with pytest.raises(ConfigError, match="the deploy config is not a model source"):
            resolve(blank, deploy_config="missing.yaml")
    other = write_fake_checkpoint(tmp_path / "other", class_name="WanPipeline")
    with pytest.raises(CheckpointError, match="LingBotWorldCausalDMDPipeline, got 'WanPipeline'"):
        resolve(str(other))


def test_pixel_mode_under_either_name(model):
    for key in ("lingbot_pixel_output_mode", "lingbot_npu_pixel_output_mode"):
        resolved = resolve(model, overrides={"model_config": {key: "root_float"}})
        assert resolved.config.pixel_output_mode == "root_float"
        assert origin_of(resolved, "model_config.lingbot_pixel_output_mode") == "keyword argument"
    assert resolve(model).config.pixel_output_mode == "auto"
