"""The reference pages of deploy file and command line are those that their definitions give."""

import pytest

from vllm_omni.config.schema import yaml_keys
from vllm_omni.config.stage import StageSection
from vllm_omni.entrypoints.cli.flags import FLAGS
from vllm_omni.tools import config_docs

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize("page", ["deploy_yaml.md", "cli.md"])
def test_the_committed_pages_are_up_to_date(page, tmp_path):
    config_docs.write_pages(tmp_path)
    committed = config_docs.REFERENCE_DIR / page
    assert committed.read_text() == (tmp_path / page).read_text(), (
        "run python -m vllm_omni.tools.config_docs"
    )


def test_every_key_and_flag_has_a_row():
    deploy, cli = config_docs.deploy_reference(), config_docs.cli_reference()
    assert all(f"| `{key}` |" in deploy for key in yaml_keys(StageSection))
    assert all(f"`{name}`" in cli for flag in FLAGS for name in flag.names)


def test_refusals_and_their_exceptions_are_shown():
    assert "| `num_replicas` | int | *refused* except `1`: " in config_docs.deploy_reference()
    assert "(no effect: one worker group serves)" in config_docs.cli_reference()
