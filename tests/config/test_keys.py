"""Every key of a stage is checked where it stands, and an unknown one gets a way out."""

import pytest

from vllm_omni.config.keys import (
    ALIASES,
    KEYS,
    OTHER_FORMS,
    SECTIONS,
    names_in,
    read_layer,
    suggest,
)
from vllm_omni.errors import ConfigError
from vllm_omni.setting import Status, no_effect_notes

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

KV = "model_config.ar_diffusion_kv_config"


def read(values):
    return read_layer(values, "here", where="here").values


def test_every_key_has_an_effect_or_a_reason():
    assert len(KEYS) > 100
    for key, one in KEYS.items():
        assert one.help, key
        assert one.section in SECTIONS
    assert all(KEYS[key] for key in ALIASES.values())
    assert not set(ALIASES) & set(KEYS)
    assert all(key in KEYS or f"{key}." in SECTIONS for key in OTHER_FORMS.values())


def test_defaults_are_values_that_their_settings_take():
    for one in KEYS.values():
        if one.default is not None:
            assert one.checked(one.default, one.key) == one.default
        for value in one.passes:
            assert one.checked(value, one.key) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devcies": "0"}, "'devcies' (did you mean devices?)"),
        ({"parallel_config": {"ulyses_degree": 2}},
         "'parallel_config.ulyses_degree' (did you mean parallel_config.ulysses_degree?)"),
        ({"ulyses_degree": 2}, "'ulyses_degree' (did you mean parallel_config.ulysses_degree?)"),
        ({"model_config": {"ar_diffusion_hight": 2}},
         "'model_config.ar_diffusion_hight' (did you mean model_config.ar_diffusion_height?)"),
        ({"model_config": {"ar_diffusion_kv_config": {"gpu_memory_fractoin": 0.5}}},
         f"'{KV}.gpu_memory_fractoin' (did you mean {KV}.gpu_memory_fraction?)"),
        ({"default_sampling_params": {"num_inference_step": 4}},
         "(did you mean default_sampling_params.num_inference_steps?)"),
        ({"quantization_config": {"method": "fp8", "ignore_layers": []}},
         "(did you mean quantization_config.ignored_layers?)"),
        ({"ar_diffusion_hight": 2},
         "'ar_diffusion_hight' (did you mean model_config.ar_diffusion_height?)"),
        # A known key in the wrong place.
        ({"ar_diffusion_height": 64},
         "'ar_diffusion_height' (use model_config.ar_diffusion_height)"),
        ({"lingbot_action_root": "/x"},
         "'lingbot_action_root' (use model_config.lingbot_action_root)"),
        ({"gpu_memory_fraction": 0.5}, f"'gpu_memory_fraction' (use {KV}.gpu_memory_fraction)"),
        ({"page_tokens": 64}, f"'page_tokens' (use {KV}.page_tokens)"),
        ({"model_config": {"page_tokens": 64}},
         f"'model_config.page_tokens' (use {KV}.page_tokens)"),
        ({"model_config": {"max_queued": 3}},
         "'model_config.max_queued' (use max_queued of the stage itself)"),
        ({"parallel_config": {"num_gpus": 3}},
         "'parallel_config.num_gpus' (use num_gpus of the stage itself)"),
        ({"num_frames": 9}, "'num_frames' (use default_sampling_params.num_frames)"),
        ({"port": 80}, "'port' (the server alone has it: --port)"),
        # A name of vLLM's.
        ({"gpu_memory_utilization": 0.9},
         f"'gpu_memory_utilization' (use {KV}.gpu_memory_fraction)"),
        ({"tp": 2}, "'tp' (use parallel_config.tensor_parallel_size)"),
        ({"max_model_len": 100}, "'max_model_len' (not used by this model)"),
        ({"zzz": 1}, "Unknown diffusion config field(s): 'zzz'"),
        ({"model_config": {"zzz": 1}}, "Unknown diffusion config field(s): 'model_config.zzz'"),
    ],
)  # fmt: skip
def test_unknown_keys(values, message):
    with pytest.raises(ConfigError) as error:
        read(values)
    assert str(error.value).startswith("here: Unknown diffusion config field(s): ")
    assert str(error.value).endswith(message)


def test_what_a_suggestion_names_exists():
    for name in ("sp", "block_size", "sliding_window", "height", "load_format"):
        said = suggest(name, ()).removeprefix(" (use ").removesuffix(")")
        assert said in KEYS, name
    assert suggest("override_generation_config", ()) == " (use default_sampling_params)"
    assert suggest("ulysses", ["a", "ulyssesx"], str.upper) == " (did you mean ULYSSESX?)"


def test_names_that_may_stand_in_a_section():
    assert set(names_in("quantization_config.")) == {"method", "ignored_layers"}
    assert "ar_diffusion_kv_config" in names_in("model_config.")
    assert {"ulysses_degree", "parallel_config", "engine_args", "quantization"} < set(names_in(""))


def test_everything_wrong_is_in_one_line():
    with pytest.raises(ConfigError) as error:
        read({"zzz": 1, "max_num_seqs": 0, "enforce_eager": "yes", "model_config": {"yyy": 2}})
    assert str(error.value) == (
        "here: Unknown diffusion config field(s): 'zzz', 'model_config.yyy'; "
        'max_num_seqs: must be at least 1, got 0; enforce_eager: must be true or false, got "yes"'
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": ["0", "1"]}, 'devices: must be a string, got ["0", "1"]'),
        ({"devices": "0,,1"}, "devices: must list different devices, separated by commas"),
        ({"devices": "0,0"}, 'must list different devices, separated by commas, got "0,0"'),
        ({"devices": ""}, 'devices: must not be empty, got ""'),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer, got true"),
        ({"max_num_seqs": "1"}, 'max_num_seqs: must be an integer, got "1"'),
        ({"max_queued": -1}, "max_queued: must be at least 0, got -1"),
        ({"enforce_eager": "true"}, 'enforce_eager: must be true or false, got "true"'),
        ({"enforce_eager": 1}, "enforce_eager: must be true or false, got 1"),
        ({"flow_shift": 0}, "flow_shift: must be above 0, got 0"),
        ({"flow_shift": 1001}, "flow_shift: must be at most 1000, got 1001"),
        ({"flow_shift": float("nan")}, "flow_shift: must be at most 1000, got NaN"),
        ({"chunk_timeout_s": float("inf")}, "chunk_timeout_s: must be a finite number"),
        ({"stage_init_timeout": 0}, "stage_init_timeout: must be above 0, got 0"),
        ({"dtype": "int8"}, 'dtype: must be auto, bfloat16, float16 or float32, got "int8"'),
        ({"device": "cuda:0"}, 'device: must be cpu, cuda or npu, got "cuda:0"'),
        ({"attention_backend": "sage"}, "must be auto, sdpa, flash, flash3, npu_fusion"),
        ({"attention_backend": 3}, "attention_backend: must be a string, got 3"),
        ({"linear_backend": "mkl"}, 'linear_backend: must be native or vllm, got "mkl"'),
        ({"distributed_executor_backend": "k8s"}, "must be mp, ray, uni or inline, got"),
        ({"model_class_name": "WanPipeline"}, "must be LingBotWorldCausalDMDPipeline, got"),
        ({"env": {"A": True}}, "env.A: must be a string, got ***"),
        ({"env": {"A": ["hf_secret"]}}, "env.A: must be a string, got ***"),
        ({"env": "A=hf_secret"}, "env: must be a mapping of names to values, got ***"),
        ({"parallel_config": {"ulysses_degree": 0}},
         "parallel_config.ulysses_degree: must be at least 1, got 0"),
        ({"parallel_config": {"ulysses_degree": 2.0}},
         "parallel_config.ulysses_degree: must be an integer, got 2.0"),
        ({"parallel_config": {"ulysses_mode": "other"}},
         "parallel_config.ulysses_mode: must be strict or advanced_uaa"),
        ({"quantization_config": {"method": "gptq"}},
         'quantization_config.method: must be fp8, fp8_per_tensor or ascend, got "gptq"'),
        ({"model_config": {"lingbot_vae_decode_fast_path": "fused"}},
         "must be off or exact, since fused changes the pixels"),
        ({"model_config": {"lingbot_vae_decode_fast_path": True}},
         "must be off or exact, got true"),
        ({"model_config": {"lingbot_reuse_last_step_kv": "true"}}, "must be true or false"),
        ({"model_config": {"lingbot_vae_spatial_sharding": 1}}, "must be true or false, got 1"),
        ({"model_config": {"lingbot_npu_pixel_output_mode": "raw"}},
         "model_config.lingbot_npu_pixel_output_mode: must be auto, native, root_float"),
        ({"model_config": {"lingbot_pixel_output_mode": "native",
                           "lingbot_npu_pixel_output_mode": "root_float"}},
         "model_config.lingbot_pixel_output_mode and "
         "model_config.lingbot_npu_pixel_output_mode are two names of one setting"),
        ({"model_config": {"lingbot_npu_quant": "w4a4"}}, "lingbot_npu_quant: must be w8a8"),
        ({"model_config": {"lingbot_npu_quant_scope": "all"}}, "npu_quant_scope: must be ffn"),
        ({KV: {"gpu_memory_fraction": 0}}, f"{KV}.gpu_memory_fraction: must be above 0, got 0"),
        ({KV: {"gpu_memory_fraction": 1.01}}, "gpu_memory_fraction: must be at most 1, got 1.01"),
        ({KV: {"gpu_memory_fraction": float("nan")}}, "gpu_memory_fraction: must be at most 1"),
        ({KV: {"gpu_memory_fraction": "0.5"}}, "gpu_memory_fraction: must be a number"),
        ({KV: {"window_chunks": 2}}, "window_chunks: must be 0 or at least 3, to hold a chunk"),
        ({KV: {"window_chunks": -1}}, "window_chunks: must be at least 0, got -1"),
        ({KV: {"sink_chunks": -1}}, "sink_chunks: must be at least 0, got -1"),
        ({KV: {"page_tokens": 0}}, "page_tokens: must be at least 1, got 0"),
        ({"default_sampling_params": {"num_inference_steps": 20}}, "must be 4, got 20"),
        ({"default_sampling_params": {"max_sequence_length": 256}}, "must be 512, got 256"),
        ({"default_sampling_params": {"num_outputs_per_prompt": 2}}, "must be 1, got 2"),
        ({"default_sampling_params": {"fps": 0.5}}, "fps: must be at least 1, got 0.5"),
        ({"default_sampling_params": {"seed": 2**63}}, "seed: must be at most 9223372036854775807"),
        ({"default_sampling_params": {"height": 5000}}, "height: must be at most 4096, got 5000"),
        ({"default_sampling_params": {"output_type": "gif"}}, "must be pil, np or latent"),
        ({"default_sampling_params": {"extra_args": {"flow_shift": True}}},
         "default_sampling_params.extra_args: flow_shift must be a number, got true"),
        ({"default_sampling_params": {"extra_args": {"flow_shift": float("inf")}}},
         "flow_shift must be at most 1000"),
        ({"default_sampling_params": {"extra_args": {"flow_shift": "5"}}},
         'flow_shift must be a number, got "5"'),
    ],
)  # fmt: skip
def test_wrong_kinds_and_values(values, message):
    with pytest.raises(ConfigError) as error:
        read(values)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_keys_may_keep_their_dots():
    assert read({f"{KV}.page_tokens": 64}) == {f"{KV}.page_tokens": 64}
    with pytest.raises(ConfigError, match="given twice"):
        read({f"{KV}.page_tokens": 64, KV: {"page_tokens": 32}})


def test_yaml_off_means_off():
    key = "model_config.lingbot_vae_decode_fast_path"
    assert read({key: False}) == read({key: "off"}) == {key: "off"}


def test_zero_is_the_window_of_the_checkpoint():
    assert read({KV: {"window_chunks": 0}}) == {f"{KV}.window_chunks": None}
    assert read({KV: {"window_chunks": 3}}) == {f"{KV}.window_chunks": 3}


@pytest.mark.parametrize(
    ("given", "meant"),
    [("BF16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", "auto")],
)
def test_names_of_dtypes(given, meant):
    assert read({"dtype": given}) == {"dtype": meant}


@pytest.mark.parametrize(
    ("given", "meant"), [("TORCH_SDPA", "sdpa"), ("FLASH_ATTN", "flash"), ("sdpa", "sdpa")]
)
def test_names_of_attention_backends(given, meant):
    assert read({"attention_backend": given}) == {"attention_backend": meant}


@pytest.mark.parametrize("one", [one for one in KEYS.values() if one.status is Status.REFUSED],
                         ids=lambda one: one.key)  # fmt: skip
def test_a_refused_key_takes_its_harmless_values_alone(one):
    for value in one.passes:
        one.refuse(value, one.key)
    wrong = {bool: True, int: 7, float: 1.5, str: "x", dict: {"a": 1}}[one.kind]
    with pytest.raises(ConfigError, match="is refused: ") as error:
        one.refuse(wrong, one.key)
    assert one.help in str(error.value)


def test_keys_without_effect_are_noted_once_unless_their_value_says_what_happens():
    values = read({
        "model": "other",
        KV: {"chunk_size": 1560, "enable": True},
        "parallel_config": {"text_encoder_tp_size": 2, "vae_parallel_mode": "tile"},
        "model_config": {"lingbot_vae_decode_fast_path": "exact"},
        "vae_use_slicing": False,
    })  # fmt: skip
    assert no_effect_notes(values, KEYS) == [
        'model="other" has no effect: the model is the one that was asked for',
        f"{KV}.chunk_size=1560 has no effect: tokens per latent frame follow from the size",
        "parallel_config.text_encoder_tp_size=2 has no effect: every rank runs the text encoder",
        'model_config.lingbot_vae_decode_fast_path="exact" has no effect: the decoder is exact',
    ]
