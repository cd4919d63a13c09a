"""Keyword arguments and stage overrides: every one is honoured, or refused with a way out."""

import warnings
from pathlib import Path

import pytest

from tests.helpers.fixtures.deployments import model, no_setting_of_this_machine
from vllm_omni.config.resolve import resolve
from vllm_omni.config.stage import ENGINE_PATH
from vllm_omni.errors import ConfigError

__all__ = ["model", "no_setting_of_this_machine"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[2]
KV = "model_config.ar_diffusion_kv_config"
PACKAGED = ROOT / "vllm_omni" / "deploy" / "lingbot_world_v2_stepwise.yaml"


@pytest.mark.parametrize("deploy_config", [None, PACKAGED])
def test_every_global_keyword_is_honoured(tmp_path, model, deploy_config):
    resolved = resolve(
        model,
        deploy_config=deploy_config,
        overrides={
            "model_config": {"lingbot_action_root": str(tmp_path)},
            "parallel_config": {"ulysses_degree": 2},
            "engine_backend": ENGINE_PATH,
            "diffusion_streaming_output": True,
            "devices": "5,6",
            "num_gpus": 2,
            "diffusion_attention_backend": "sdpa",
            "extras": {"max_queued": 3, "distributed_executor_backend": "mp"},
            "max_num_seqs": None,
        },
        platform="cuda",
    )
    config = resolved.config
    assert config.action_root == str(tmp_path)
    assert config.parallel.ulysses_degree == 2
    assert resolved.engine_backend == "ar_diffusion"
    assert resolved.streaming_output is True
    assert (config.devices, config.attention_backend) == ("5,6", "sdpa")
    assert (config.max_queued, config.max_num_seqs) == (3, 1)
    assert resolve(model, overrides={"streaming_output": True}).streaming_output is True


def test_keyword_arguments_do_not_warn_about_their_names(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(model, overrides={"diffusion_attention_backend": "sdpa", "max_batch_size": 2})


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"ulyses_degree": 2}, ValueError, r"Unknown .* field\(s\): 'ulyses_degree' \(did you "
         r"mean parallel_config.ulysses_degree\?\)"),
        ({"extras": {"ulyses_degree": 2}}, ValueError, "did you mean parallel_config.ul"),
        ({"extras": 3}, TypeError, "extras must be a mapping"),
        ({"stage_configs": []}, ValueError, "deploy_config"),
        ({"stage_configs_path": "x"}, ValueError, "deploy_config"),
        ({"diffusion_batch_size": 2}, TypeError, "diffusion_batch_size"),
        ({"log_requests": True}, TypeError, "log_requests"),
        ({"strategy_config": "x"}, ValueError, 'strategy_config="x" is refused'),
        ({"num_gpus": 4}, ValueError, "num_gpus is 4, but .* makes 1 ranks"),
        ({"stage_1_dtype": "float32"}, ValueError, "unknown stage 1"),
        ({"stage_0_dtpye": "float32"}, ValueError, "stage override: .*did you mean dtype"),
        ({"default_sampling_params": {"seed": 3}}, ValueError, "unknown stage 'seed'"),
        ({"default_sampling_params": "{"}, ValueError, "is not JSON"),
        ({"parallel_config": 3}, TypeError, "parallel_config must be a mapping"),
        ({"devices": [0, 1]}, ValueError, "devices"),
        ({"omni_dp_size_local": 2, "distributed_executor_backend": "inline"}, ValueError,
         "one process cannot hold 2 worker groups"),
        ({"num_replicas": 2, "max_replicas": 1}, ValueError, "max_replicas is 1, but num_replicas"),
        ({"max_replicas": 2, "max_queued": 0, "distributed_executor_backend": "mp"}, ValueError,
         "no replica beyond num_replicas=1 would ever start"),
        ({"elastic": {"spare": -1}}, ValueError, "elastic.spare: must be at least 0"),
        ({"omni_heartbeat_timeout": 0.0}, ValueError, "omni_heartbeat_timeout"),
        ({"omni_lb_policy": "best"}, ValueError, "omni_lb_policy"),
        ({"ray_address": "ray://head:10001"}, ValueError, "not of a client"),
        ({"ray": {"placement": "wide"}}, ValueError, "must be pack, strict_pack or spread"),
        ({"ray": {"resources": {"H200": 0}}}, ValueError, "ray.resources.H200: must be above 0"),
    ],
)  # fmt: skip
def test_keyword_arguments_that_are_refused(model, overrides, error, message):
    with pytest.raises(error, match=message):
        resolve(model, overrides=overrides)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"1": {}}, "unknown stage '1'"),
        ({"0": 3}, "stage 0 must be a mapping"),
        ([], "must look like"),
        ("{", "is not JSON"),
        ({"0": {"max_num_sqs": 1}}, "did you mean max_num_seqs"),
    ],
)
def test_stage_overrides_that_are_refused(model, given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(model, stage_overrides=given if not isinstance(given, list) else str(given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ar_diffusion_height": 64}, r"use model_config\.ar_diffusion_height\)$"),
        ({"lingbot_action_root": "/"}, r"use model_config\.lingbot_action_root\)$"),
        ({"gpu_memory_fraction": 0.5}, rf"use {KV}\.gpu_memory_fraction\)$"),
        ({"page_tokens": 64}, rf"use {KV}\.page_tokens\)$"),
        ({"stage_0_page_tokens": 64}, rf"use {KV}\.page_tokens\)$"),
        ({"extras": {"page_tokens": 64}}, rf"use {KV}\.page_tokens\)$"),
    ],
)
def test_a_known_key_in_the_wrong_place_is_told_its_place(model, given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(model, overrides=given)


def test_stage_overrides_as_json(model):
    config = resolve(model, stage_overrides='{"0": {"max_num_seqs": 3}}').config
    assert config.max_num_seqs == 3
