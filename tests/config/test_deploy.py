"""Sections of a deploy file refuse what they do not know, with a suggestion."""

import pytest

from vllm_omni.config.deploy import KVSection, ModelSection, SamplingSection
from vllm_omni.config.schema import no_effect_notes, parse_section
from vllm_omni.config.stage import StageSection
from vllm_omni.errors import ConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


def parse(values, section=StageSection):
    return parse_section(section, values, where="here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devcies": "0"}, r"'devcies' \(did you mean 'devices'\?\)"),
        ({"parallel_config": {"ulyses_degree": 2}},
         r"'parallel_config.ulyses_degree' \(did you mean 'ulysses_degree'\?\)"),
        ({"model_config": {"ar_diffusion_hight": 2}},
         r"'model_config.ar_diffusion_hight' \(did you mean 'ar_diffusion_height'\?\)"),
        ({"model_config": {"ar_diffusion_kv_config": {"gpu_memory_fractoin": 0.5}}},
         r"'model_config.ar_diffusion_kv_config.gpu_memory_fractoin' \(did you mean "
         r"'gpu_memory_fraction'\?\)"),
        ({"default_sampling_params": {"num_inference_step": 4}},
         r"did you mean 'num_inference_steps'\?"),
        ({"quantization_config": {"method": "fp8", "ignore_layers": []}},
         r"did you mean 'ignored_layers'\?"),
        ({"zzz": 1}, r"Unknown diffusion config field\(s\): 'zzz'$"),
    ],
)  # fmt: skip
def test_unknown_keys_at_every_level(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(values)


def test_everything_wrong_is_in_one_line():
    with pytest.raises(ConfigError) as error:
        parse({"zzz": 1, "max_num_seqs": 0, "enforce_eager": "yes"})
    text = str(error.value)
    assert text.startswith("here: ")
    assert "\n" not in text
    assert all(part in text for part in ("'zzz'", "max_num_seqs", "enforce_eager", "got 'yes'"))


@pytest.mark.parametrize(
    "values",
    [
        {"devices": ["0", "1"]},
        {"devices": "0,,1"},
        {"devices": "0,0"},
        {"devices": ""},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_num_seqs": "1"},
        {"enforce_eager": "true"},
        {"enforce_eager": 1},
        {"flow_shift": 0},
        {"flow_shift": float("nan")},
        {"dtype": "int8"},
        {"device": "cuda:0"},
        {"attention_backend": "sage"},
        {"linear_backend": "mkl"},
        {"distributed_executor_backend": "ray"},
        {"model_class_name": "WanPipeline"},
        {"env": {"A": True}},
        {"env": {"A": [1]}},
        {"parallel_config": {"ulysses_degree": 0}},
        {"parallel_config": {"ulysses_degree": 2.0}},
        {"parallel_config": {"ulysses_mode": "other"}},
        {"quantization_config": {"method": "gptq"}},
        {"quantization_config": {}},
        {"quantization_config": 8},
    ],
)
def test_wrong_types_and_values(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        parse(values)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("enable_cpu_offload", True, False),
        ("enable_layerwise_offload", True, False),
        ("enable_distributed_layerwise_offload", True, False),
        ("diffusion_offload_config", {"a": 1}, {}),
        ("vae_use_tiling", True, False),
        ("cache_backend", "tea_cache", "none"),
        ("cache_config", {"threshold": 0.1}, {}),
        ("diffusion_compile_granularity", "full", "regional"),
        ("diffusion_load_format", "dummy", "default"),
        ("num_replicas", 2, 1),
        ("use_v2_model_runner", True, False),
        ("kv_cache_dtype", "fp8", None),
        ("seed", 3, None),
        ("static_lora_scale", 1.0, None),
        ("lora_path", "x", None),
    ],
)
def test_keys_that_change_results_are_refused_by_name(key, value, neutral):
    with pytest.raises(ConfigError, match=f"{key}=.* is refused: "):
        parse({key: value})
    assert list(no_effect_notes(parse({key: neutral}))) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lingbot_vae_decode_fast_path": "fused"}, "'fused' changes the pixels and is refused"),
        ({"lingbot_vae_decode_fast_path": True}, "must be off or exact"),
        ({"lingbot_reuse_last_step_kv": "true"}, "lingbot_reuse_last_step_kv"),
        ({"lingbot_vae_spatial_sharding": 1}, "lingbot_vae_spatial_sharding"),
        ({"lingbot_npu_pixel_output_mode": "raw"}, "must be one of auto, native"),
        ({"lingbot_pixel_output_mode": "native", "lingbot_npu_pixel_output_mode": "root_float"},
         "is 'native' but lingbot_npu_pixel_output_mode is 'root_float'"),
        ({"lingbot_npu_quant": "w4a4"}, "lingbot_npu_quant"),
        ({"lingbot_npu_quant_scope": "all"}, "lingbot_npu_quant_scope"),
    ],
)  # fmt: skip
def test_model_options(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(values, ModelSection)


def test_yaml_off_means_off():
    assert parse({"lingbot_vae_decode_fast_path": False}, ModelSection) == parse(
        {"lingbot_vae_decode_fast_path": "off"}, ModelSection
    )


def test_the_decoder_is_exact_whatever_is_asked():
    def notes(value):
        return list(no_effect_notes(parse({"lingbot_vae_decode_fast_path": value}, ModelSection)))

    assert notes("exact") == [
        "lingbot_vae_decode_fast_path='exact' has no effect: the decoder is exact"
    ]
    assert notes("off") == notes(False) == []


def test_values_of_the_environment_are_not_shown_in_errors():
    with pytest.raises(ConfigError, match=r"env\.A.*got \*\*\*") as caught:
        parse({"env": {"A": ["hf_secret"]}})
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("fraction", [0, 1.01, -0.1, float("nan"), "0.5"])
def test_kv_fraction(fraction):
    with pytest.raises(ConfigError, match="gpu_memory_fraction"):
        parse({"gpu_memory_fraction": fraction}, KVSection)


@pytest.mark.parametrize("values", [{"window_chunks": 2}, {"window_chunks": -1},
                                    {"sink_chunks": -1}, {"page_tokens": 0},
                                    {"reset_at_boundary": True}])  # fmt: skip
def test_kv_shape(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        parse(values, KVSection)


@pytest.mark.parametrize(
    "values",
    [
        {"num_inference_steps": 20},
        {"max_sequence_length": 256},
        {"height": 64},
        {"output_type": "gif"},
        {"num_outputs_per_prompt": 2},
        {"extra_args": {"flow_shift": True}},
        {"extra_args": {"flow_shift": float("inf")}},
        {"extra_args": {"flow_shift": "5"}},
    ],
)
def test_sampling_defaults_that_no_request_could_use(values):
    with pytest.raises(ConfigError):
        parse(values, SamplingSection)


def test_keys_without_effect_are_reported_with_their_path():
    stage = parse({
        "model": "other",
        "model_config": {"ar_diffusion_kv_config": {"chunk_size": 1560, "enable": True}},
        "parallel_config": {"text_encoder_tp_size": 2, "vae_parallel_mode": "tile"},
    })  # fmt: skip
    notes = [note.partition(" has no effect: ")[0] for note in no_effect_notes(stage)]
    assert sorted(notes) == [
        "model='other'",
        "model_config.ar_diffusion_kv_config.chunk_size=1560",
        "parallel_config.text_encoder_tp_size=2",
    ]


@pytest.mark.parametrize(
    ("given", "meant"),
    [("BF16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", "auto")],
)
def test_names_of_dtypes(given, meant):
    assert parse({"dtype": given}).dtype == meant


@pytest.mark.parametrize(
    ("given", "meant"), [("TORCH_SDPA", "sdpa"), ("FLASH_ATTN", "flash"), ("sdpa", "sdpa")]
)
def test_names_of_attention_backends(given, meant):
    assert parse({"attention_backend": given}).attention_backend == meant
