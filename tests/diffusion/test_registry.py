"""A checkpoint names its model; small files say whether it can be loaded."""

import ast
from pathlib import Path

import pytest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from vllm_omni.diffusion.data import DiffusionParallelConfig
from vllm_omni.diffusion.registry import LINGBOT_WORLD, model_of
from vllm_omni.errors import CheckpointError, UnsupportedParallelismError

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion, pytest.mark.cpu]

ONE = DiffusionParallelConfig()


def test_the_index_names_the_model(tmp_path):
    assert model_of(write_fake_checkpoint(tmp_path / "model")) is LINGBOT_WORLD


def test_another_model_is_refused_with_the_file(tmp_path):
    directory = write_fake_checkpoint(tmp_path / "model", class_name="WanPipeline")
    words = "model_index.json: _class_name must be LingBotWorldCausalDMDPipeline, got 'WanPipeline'"
    with pytest.raises(CheckpointError, match=words):
        model_of(directory)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not valid JSON"), ("[]", "_class_name"), (None, "be read")]
)
def test_broken_indices(tmp_path, content, message):
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        model_of(tmp_path)


def test_degrees_must_divide_the_heads(tmp_path):
    directory = write_fake_checkpoint(tmp_path / "model", heads=40)
    model_of(directory).check_checkpoint(directory, ONE)
    with pytest.raises(UnsupportedParallelismError, match="40 attention heads"):
        LINGBOT_WORLD.check_checkpoint(directory, DiffusionParallelConfig(ulysses_degree=3))


@pytest.mark.parametrize("heads", [0, -4, "4", True, None, 4.0])
def test_heads_that_are_no_count(tmp_path, heads):
    directory = write_fake_checkpoint(tmp_path / "model", heads=heads)
    with pytest.raises(CheckpointError, match=r"config.json: num_attention_heads: must be"):
        LINGBOT_WORLD.check_checkpoint(directory, ONE)


PACKAGE = Path(__file__).resolve().parents[2] / "vllm_omni"
NAMES = ("lingbot_world", "LingBotWorld")
AT_HOME = ("diffusion/models/lingbot_world/", "diffusion/registry.py", "tools/", "benchmarks/")
"""Where a model may be named: in its own folder, in the registry, in tools for this one model."""
FILES = {
    "platforms/npu.py": "docs/recipes/lingbot_world_v2_npu.md",
}
"""Files of the repository that have the name in theirs."""


def naming(path: Path) -> list[str]:
    """Texts of a module, documentation apart, that name the model."""
    tree = ast.parse(path.read_text())
    told = {
        id(node.value) for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    texts = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    ]  # fmt: skip
    return [text for text in texts if any(name in text for name in NAMES)]


def test_nothing_else_names_a_model_not_even_in_a_string():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith(AT_HOME):
            found += [
                f"{place}: {text}" for text in naming(path) if FILES.get(place, "-") not in text
            ]
    assert found == []


def test_the_search_finds_a_name(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""lingbot_world"""\nplace = f"{1}.lingbot_world.load"\n')
    assert naming(module) == [".lingbot_world.load"]
