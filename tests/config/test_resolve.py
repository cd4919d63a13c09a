"""One resolver: precedence, spellings, refusals, and no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.fixtures.deployments import model, no_setting_of_this_machine, real_size
from vllm_omni.config.keys import KEYS
from vllm_omni.config.resolve import resolve
from vllm_omni.diffusion.data import DiffusionParallelConfig, SamplingDefaults
from vllm_omni.diffusion.geometry import VideoGeometry
from vllm_omni.diffusion.registry import LINGBOT_WORLD
from vllm_omni.errors import CheckpointError, ConfigError
from vllm_omni.setting import Status

__all__ = ["model", "no_setting_of_this_machine", "real_size"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

KV = "model_config.ar_diffusion_kv_config"
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "benchmarks" / "lingbot_world" / "configs"
PACKAGED = ROOT / "vllm_omni" / "deploy" / "lingbot_world_v2_stepwise.yaml"


@pytest.fixture
def deploy(tmp_path):
    def write(stage="", top=""):
        path = tmp_path / "deploy.yaml"
        path.write_text(f"{top}\nstages:\n- stage_id: 0\n{stage}")
        return path

    return write


def origin_of(resolved, key):
    return next(value.origin for value in resolved.origins if value.key == key)


# --- the files that ship ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "devices", "eager", "ulysses"),
    [
        (PACKAGED, "0", False, 1),
        (CONFIGS / "npu_usp4_eager.yaml", "0,1,2,3", True, 4),
        (CONFIGS / "usp4_compiled.yaml", "0,1,2,3", False, 4),
        (CONFIGS / "single_gpu_eager.yaml", "0", True, 1),
    ],
)
def test_shipped_files(real_size, path, devices, eager, ulysses):
    resolved = resolve(real_size, deploy_config=path, platform="cuda")
    config = resolved.config
    assert (config.devices, config.enforce_eager) == (devices, eager)
    assert (config.parallel.tensor_parallel_size, config.parallel.ulysses_degree) == (1, ulysses)
    assert (config.dtype, config.executor, config.max_num_seqs) == ("bfloat16", "mp", 1)
    assert config.geometry == VideoGeometry(480, 832)
    assert config.kv_cache.gpu_memory_fraction == 0.6
    assert config.vae_spatial_sharding is True
    assert (resolved.step_execution, resolved.streaming_output) == (True, True)
    assert resolved.engine_backend == "ar_diffusion"
    assert resolved.default_sampling_params == SamplingDefaults(
        num_inference_steps=4, output_type="pil", extra_args={"flow_shift": 5.0}
    )


def test_the_tiny_file(model):
    resolved = resolve(model, deploy_config=CONFIGS / "cpu_tiny.yaml", platform="cuda")
    config = resolved.config
    assert (config.device, config.dtype, config.executor) == ("cpu", "float32", "mp")
    assert config.geometry == VideoGeometry(64, 96)
    assert (resolved.step_execution, resolved.streaming_output) == (True, True)
    assert resolved.no_effect == ()


def test_resolution_loads_no_torch(model):
    code = (
        "import sys; from vllm_omni.config.resolve import resolve; "
        f"resolve({model!r}, deploy_config={str(CONFIGS / 'cpu_tiny.yaml')!r}); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- precedence ------------------------------------------------------------------------------

LAYERS = ("platform", "top", "stage", "flag", "override", "stage_kwarg")


@pytest.mark.parametrize("strongest", range(len(LAYERS)))
def test_each_layer_wins_over_all_weaker_ones(model, deploy, strongest):
    names = LAYERS[: strongest + 1]
    dtype = dict(zip(LAYERS, ["float16", "float32", "bfloat16"] * 2, strict=True))
    top = f"dtype: {dtype['top']}\n" if "top" in names else ""
    top += f"platforms: {{npu: {{stages: [{{stage_id: 0, dtype: {dtype['platform']}}}]}}}}"
    overrides = {"dtype": dtype["flag"]} if "flag" in names else {}
    if "stage_kwarg" in names:
        overrides["stage_0_dtype"] = dtype["stage_kwarg"]
    resolved = resolve(
        model,
        deploy_config=deploy(f"  dtype: {dtype['stage']}" if "stage" in names else "", top),
        overrides=overrides,
        stage_overrides={"0": {"dtype": dtype["override"]}} if "override" in names else None,
        platform="npu",
    )
    assert resolved.config.dtype == dtype[names[-1]]
    expected = {
        "platform": "platforms.npu", "top": "deploy.yaml", "stage": "deploy.yaml",
        "flag": "keyword argument", "override": "stage override", "stage_kwarg": "stage override",
    }  # fmt: skip
    assert expected[names[-1]] in origin_of(resolved, "dtype")


def test_without_any_layer_the_default_depends_on_the_platform(model):
    dtypes = [resolve(model, platform=name).config.dtype for name in ("cpu", "cuda", "npu")]
    assert dtypes == ["float32", "bfloat16", "bfloat16"]
    assert resolve(model, overrides={"dtype": "auto"}).config.dtype == "float32"
    assert resolve(model, overrides={"dtype": "bfloat16"}).config.dtype == "bfloat16"


def test_a_platform_value_that_the_stage_overrules_is_reported(model, deploy):
    path = deploy(
        "  devices: '0'", "platforms: {npu: {stages: [{stage_id: 0, devices: '4', env: {A: x}}]}}"
    )
    resolved = resolve(model, deploy_config=path, platform="npu")
    assert resolved.config.devices == "0"
    assert resolved.config.env == {"A": "x"}
    assert len(resolved.no_effect) == 1
    assert "devices of" in resolved.no_effect[0]
    assert "platforms.npu" in resolved.no_effect[0]


def test_sections_of_other_platforms_are_checked_but_not_used(model, deploy):
    top = "platforms: {npu: {stages: [{stage_id: 0, max_num_seqs: 3}]}}"
    resolved = resolve(model, deploy_config=deploy(top=top), platform="cuda", visible_devices=1)
    assert resolved.config.max_num_seqs == 1
    bad = "platforms: {xpu: {stages: [{stage_id: 0, max_num_sqs: 3}]}}"
    with pytest.raises(ConfigError, match=r"platforms.xpu.*did you mean max_num_seqs"):
        resolve(model, deploy_config=deploy(top=bad))
    with pytest.raises(ConfigError, match=r"platforms.npu cannot set device"):
        resolve(
            model,
            deploy_config=deploy(top="platforms: {npu: {stages: [{stage_id: 0, device: cpu}]}}"),
        )


@pytest.mark.parametrize(
    ("overrides", "tensor", "ulysses"),
    [
        ({"ulysses_degree": 2}, 1, 2),
        ({"tensor_parallel_size": 2}, 2, 4),
        ({"parallel_config": {"ulysses_degree": 2}}, 1, 2),
        ({"parallel_config": {"tensor_parallel_size": 2}}, 2, 4),
        ({"parallel_config": DiffusionParallelConfig(tensor_parallel_size=2)}, 2, 1),
        ({"parallel_config": {"ulysses_degree": 2}, "ulysses_degree": 1}, 1, 1),
        ({"stage_0_parallel_config": {"ulysses_degree": 2}}, 1, 2),
        ({"stage_0_ulysses_degree": 2, "ulysses_degree": 1}, 1, 2),
    ],
)
def test_degrees_over_a_file_with_four_ranks(real_size, overrides, tensor, ulysses):
    parallel = resolve(
        real_size,
        deploy_config=CONFIGS / "usp4_compiled.yaml",
        overrides=overrides,
        platform="cuda",
        visible_devices=8,
    ).config.parallel
    assert (parallel.tensor_parallel_size, parallel.ulysses_degree) == (tensor, ulysses)


def test_nested_degrees_win_over_flat_ones_inside_a_file(model, deploy):
    stage = "  ulysses_degree: 4\n  tensor_parallel_size: 2\n  parallel_config: {ulysses_degree: 2}"
    parallel = resolve(model, deploy_config=deploy(f"{stage}\n  distributed_executor_backend: mp"))
    assert parallel.config.parallel.ulysses_degree == 2
    assert parallel.config.parallel.tensor_parallel_size == 2


def test_mappings_of_overrides_merge_deeply(model):
    resolved = resolve(
        model,
        deploy_config=PACKAGED,
        overrides={
            "model_config": {"ar_diffusion_width": 320, "ar_diffusion_kv_config": {}},
            "stage_0_model_config": {"ar_diffusion_height": 240},
            "default_sampling_params": {"0": {"seed": 7, "extra_args": {"more": 1}}},
        },
        platform="cuda",
    )
    assert resolved.default_sampling_params.generator_device is None
    assert resolved.config.geometry == VideoGeometry(240, 320)
    assert resolved.config.kv_cache.gpu_memory_fraction == 0.6
    assert resolved.default_sampling_params.seed == 7
    assert resolved.default_sampling_params.num_inference_steps == 4
    assert resolved.default_sampling_params.extra_args == {"flow_shift": 5.0, "more": 1}


@pytest.mark.parametrize("place", ["cpu", "npu"])
def test_noise_may_be_drawn_on_the_host_or_on_the_device(model, place):
    sampling = {"default_sampling_params": {"0": {"generator_device": place}}}
    resolved = resolve(model, deploy_config=PACKAGED, overrides=sampling, platform="npu")
    assert resolved.default_sampling_params.generator_device == place


def test_the_class_of_the_deployment_wins_over_the_index_of_the_checkpoint(tmp_path, deploy):
    model = write_fake_checkpoint(tmp_path / "other", class_name="SomeReleasedPipeline")
    resolved = resolve(str(model), deploy_config=PACKAGED, platform="cuda")
    assert resolved.model is LINGBOT_WORLD
    assert resolved.config.model_class_name == LINGBOT_WORLD.class_name
    (note,) = (line for line in resolved.no_effect if "_class_name" in line)
    assert note.startswith("_class_name 'SomeReleasedPipeline' of model_index.json has no effect")
    with pytest.raises(CheckpointError, match="got 'SomeReleasedPipeline'"):
        resolve(str(model), deploy_config=deploy())


def test_false_overrides_true(model):
    eager = resolve(
        model, deploy_config=PACKAGED, overrides={"enforce_eager": False}, platform="cuda"
    )
    assert eager.config.enforce_eager is False
    assert origin_of(eager, "enforce_eager") == "keyword argument"


def test_a_null_in_a_nested_override_takes_the_checkpoints_value(model, deploy):
    stage = "  model_config: {ar_diffusion_kv_config: {window_chunks: 6, sink_chunks: 3}}"
    overrides = {"model_config": {"ar_diffusion_kv_config": {"window_chunks": None}}}
    kv = resolve(model, deploy_config=deploy(stage), overrides=overrides).config.kv_cache
    assert (kv.window_chunks, kv.sink_chunks) == (None, 3)


# --- the start-up look ------------------------------------------------------------------------


def shown(resolved):
    return {value.key: str(value.shown) for value in resolved.origins}


def test_what_is_left_to_the_checkpoint_says_so(model):
    said = shown(resolve(model))
    for key in (f"{KV}.window_chunks", f"{KV}.sink_chunks", "flow_shift"):
        assert said[key] == "the checkpoint's"
    assert said["devices"] == "all"
    assert said["max_num_seqs"] == "1"
    assert said["model_config.ar_diffusion_height"].endswith("no size is warmed up")
    assert {value.origin for value in resolve(model).origins} == {"default"}


def test_what_was_given_is_shown_as_given(model):
    kv = {"ar_diffusion_kv_config": {"window_chunks": 4, "sink_chunks": 2}}
    resolved = resolve(model, overrides={"model_config": kv, "max_queued": 0})
    said = shown(resolved)
    assert (said[f"{KV}.window_chunks"], said[f"{KV}.sink_chunks"]) == ("4", "2")
    assert said["max_queued"] == "0"
    lines = [str(value) for value in resolved.origins]
    assert f"{KV}.sink_chunks = 2 (keyword argument)" in lines


def test_every_setting_that_does_something_has_a_line_and_a_consumer(model):
    """A key that is declared and reaches nothing would stay at its default here."""
    used = {key for key, one in KEYS.items() if one.status is Status.USED and not one.is_open}
    resolved = resolve(
        model,
        deploy_config=PACKAGED,
        overrides={"devices": "0", "num_gpus": 1, "sequence_parallel_size": 1},
        stage_overrides={"0": {"model_config": {"lingbot_action_root": "/"}}},
        platform="cuda",
    )
    optional = {"quantization_config.method", "quantization_config.ignored_layers",
                "model_config.lingbot_npu_quant"}  # fmt: skip
    sampling = {key for key in used if key.startswith("default_sampling_params.")}
    assert used - set(shown(resolved)) - optional - sampling == set()


# --- spellings -------------------------------------------------------------------------------


def test_engine_args_and_runtime_win_over_flat_keys(model, deploy):
    stage = (
        "  devices: '0'\n  max_num_seqs: 1\n  num_replicas: 3\n"
        "  engine_args: {max_num_seqs: 2, devices: '1'}\n"
        "  runtime: {devices: '2', env: {OMP_NUM_THREADS: 4}, num_replicas: 1}\n"
    )
    config = resolve(model, deploy_config=deploy(stage), platform="npu").config
    assert (config.devices, config.max_num_seqs) == ("2", 2)
    assert config.env == {"OMP_NUM_THREADS": "4"}
    with pytest.raises(ConfigError, match=r"runtime.process"):
        resolve(model, deploy_config=deploy("  runtime: {process: true}"))


def test_the_older_name_of_streaming_output(model, deploy):
    for stage in (
        "  diffusion_streaming_output: true",
        "  diffusion_streaming_output: true\n  streaming_output: true",
    ):
        assert resolve(model, deploy_config=deploy(stage)).streaming_output is True
    with pytest.raises(ConfigError, match="two names of one setting"):
        resolve(
            model,
            deploy_config=deploy("  diffusion_streaming_output: true\n  streaming_output: false"),
        )


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("max_batch_size", "max_num_seqs", "2"),
        ("diffusion_attention_backend", "attention_backend", "sdpa"),
    ],
)
def test_deprecated_names_warn_and_clash_with_the_new_one(model, deploy, old, new, value):
    with pytest.warns(FutureWarning, match=f"{old} is the older name of {new}"):
        config = resolve(model, deploy_config=deploy(f"  {old}: {value}")).config
    assert str({"max_num_seqs": config.max_num_seqs,
                "attention_backend": config.attention_backend}[new]) == value  # fmt: skip
    other = {"2": "3", "sdpa": "flash"}[value]
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match=f"{old} and {new} are two names"),
    ):
        resolve(model, deploy_config=deploy(f"  {old}: {value}\n  {new}: {other}"))


def test_two_names_of_a_quantisation(model, deploy):
    with pytest.raises(ConfigError, match="two names of one setting"):
        resolve(model, deploy_config=deploy("  quantization: fp8\n  quantization_config: fp8"))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"backend": "sdpa"}, "sdpa"),
        ({"default": {"backend": "TORCH_SDPA"}}, "sdpa"),
        ({"default": "flash"}, "flash"),
    ],
)
def test_attention_config(model, given, meant):
    config = resolve(model, overrides={"diffusion_attention_config": given}).config
    assert config.attention_backend == meant


@pytest.mark.parametrize(
    "given", [{}, {"backend": 3}, {"self": "sdpa"}, {"backend": "sdpa", "cross": "flash"}]
)
def test_attention_config_that_says_something_else(model, given):
    with pytest.raises(ConfigError, match="attention_config must be"):
        resolve(model, overrides={"attention_config": given})


# --- what is refused ------------------------------------------------------------------------


def test_what_counts_for_a_refusal_is_the_value_in_force(real_size, deploy):
    ring = deploy("  ring_degree: 2\n  vae_use_tiling: true")
    with pytest.raises(
        ConfigError, match=r"deploy file .*deploy.yaml: vae_use_tiling=true is refu"
    ):
        resolve(real_size, deploy_config=ring, overrides={"ring_degree": 1})
    above = {"ring_degree": 1, "vae_use_tiling": False}
    assert resolve(real_size, deploy_config=ring, overrides=above).config.parallel.world_size == 1
    top = "platforms: {xpu: {stages: [{stage_id: 0, enable_cpu_offload: true}]}}"
    assert resolve(real_size, deploy_config=deploy(top=top)).no_effect == ()


def test_a_wrong_variable_of_the_environment_is_refused_before_anything_else(model, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "many")
    with pytest.raises(ConfigError, match="environment: VLLM_MAX_IMAGE_PIXELS: must be an integer"):
        resolve(model, deploy_config="missing.yaml")
