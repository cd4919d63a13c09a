"""The reference pages of deploy file and command line are those that their definitions give."""

import pytest

from docs.reference import config_docs
from vllm_omni import envs
from vllm_omni.config.keys import KEYS
from vllm_omni.entrypoints.cli.flags import FLAGS

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]


@pytest.mark.parametrize("page", ["deploy_yaml.md", "cli.md"])
def test_the_committed_pages_are_up_to_date(page, tmp_path):
    config_docs.write_pages(tmp_path)
    committed = config_docs.REFERENCE_DIR / page
    assert committed.read_text() == (tmp_path / page).read_text(), (
        "run python -m docs.reference.config_docs"
    )


def test_every_key_and_flag_has_a_row():
    deploy, cli = config_docs.deploy_reference(), config_docs.cli_reference()
    assert all(
        f"| `{one.key}` |" in deploy or f"| `{one.name}` |" in deploy for one in KEYS.values()
    )
    assert all(f"`{name}`" in cli for flag in FLAGS for name in flag.names)


def test_a_key_that_is_not_exact_cites_its_row():
    costs = (config_docs.REFERENCE_DIR.parent / "toy_world.md").read_text()
    deploy = config_docs.deploy_reference()
    for key in config_docs.NOT_EXACT:
        anchor = f"cost-{KEYS[key].name}"
        assert f"(../toy_world.md#{anchor})" in deploy
        assert costs.count(f'| <a id="{anchor}"></a>') == 1


def test_refusals_and_their_exceptions_are_shown():
    assert "| `data_parallel_size_local` | int | `1` | one" in config_docs.deploy_reference()
    cli = config_docs.cli_reference()
    assert "| only 1: one worker group on this machine serves |" in cli
    assert "| no effect: figures are at /metrics |" in cli


def test_defaults_and_variables_of_the_environment_are_shown():
    assert "| `max_queued` | int | 16 | sessions that may wait for a place |" in (
        config_docs.deploy_reference()
    )
    cli = config_docs.cli_reference()
    assert all(f"| `{one.name}` |" in cli for one in envs.VARIABLES)
