"""Deploy files: finding, reading, inheritance, and the keys of their top level.

A file means to its reader what it means to its writer: YAML 1.1 would read 010 as eight, 1:30 as
ninety, 1_000 as a thousand and 2024-01-01 as a day, where a text or another number is meant.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml

from vllm_omni.config.keys import KEYS, refuse_all, suggest
from vllm_omni.diffusion.registry import MODELS
from vllm_omni.errors import ConfigError, ConfigNotFoundError
from vllm_omni.other_keys import TOP_KEYS
from vllm_omni.setting import PARALLEL, Setting, Text, names, no_effect_notes
from vllm_omni.system_errors import expand_home, sentence
from vllm_omni.wording import one_of, shown

_TAG = "tag:yaml.org,2002:"
_PLAIN = {
    f"{_TAG}int": re.compile(r"[-+]?(0|[1-9][0-9]*)"),
    f"{_TAG}float": re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
    f"{_TAG}timestamp": re.compile(r"(?!)"),
}
"""What a scalar of each kind may look like without quotes."""


def read_mapping(path: Path) -> dict[str, object]:
    """Read a file whose top level is a mapping; an empty one is an empty mapping.

    Raises:
        OSError: if it cannot be read.
        ConfigError: if it is no such YAML; naming the line of what the reader would take without a
            word, although it can hardly be meant: a key that is given twice, a number that is not
            plainly decimal, an anchor that holds itself.
    """
    try:
        text = path.read_text(encoding="utf-8")
        _walk(yaml.compose(text, Loader=yaml.SafeLoader), path, set(), set())
        tree = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"{path} is not usable: its lists and mappings are too deep") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}") from None
    return as_mapping({} if tree is None else tree, path)


def as_mapping(value: object, path: Path) -> dict[str, object]:
    """A part of a file that has to be a mapping of names; raises ConfigError if it is none."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path} must be a mapping with names as keys, got {value!r}")
    return value


def _walk(node: yaml.Node | None, path: Path, within: set[int], done: set[int]) -> None:
    if node is None or id(node) in done:
        return
    where = f"{path}: line {node.start_mark.line + 1}"
    if id(node) in within:
        raise ConfigError(f"{where}: an anchor holds itself")
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, where)
        return
    within.add(id(node))
    for child in _children(node, path):
        _walk(child, path, within, done)
    within.discard(id(node))
    done.add(id(node))


def _children(node: yaml.Node, path: Path) -> list[yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        return node.value
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"{path}: line {line}: key {key.value!r} is given twice")
        seen.add(str(key.value))
    return [part for pair in node.value for part in pair]


def _check_scalar(node: yaml.ScalarNode, where: str) -> None:
    plain = _PLAIN.get(node.tag)
    if node.style is None and plain is not None and not plain.fullmatch(node.value):
        raise ConfigError(
            f"{where}: {shown(node.value)} without quotes would be read as a number or a day that "
            "it does not show; write a plain decimal number, or a text in quotes"
        )


PACKAGED_DIR = Path(__file__).resolve().parents[1] / "deploy"
PLATFORMS = ("cpu", "cuda", "npu", "rocm", "xpu", "musa")
_FOR_THE_STAGE = (
    "dtype", "distributed_executor_backend", "quantization", "pipeline_parallel_size",
    "data_parallel_size",
)  # fmt: skip
_SEE_STAGE = "as the stage key of this name, which wins"
_STAGES = Setting("stages", list[dict[str, object]], "stages by stage_id; there is one, stage 0")
_Pipeline = Annotated[str, names(entry.pipeline for entry in MODELS.values())]
TOP: dict[str, Setting] = {
    one.key: one
    for one in (
        Setting("pipeline", _Pipeline, "model that is served"),
        Setting("base_config", Text, "file to inherit from, relative to this one"),
        _STAGES,
        Setting(
            "platforms", dict[str, dict[str, object]],
            "platform name -> {stages: [...]}: values for keys that the stage leaves out",
        ),
        Setting("quantization", object, _SEE_STAGE),
        *(Setting(key, KEYS[key if key in KEYS else PARALLEL + key].type, _SEE_STAGE)
          for key in _FOR_THE_STAGE if key != "quantization"),
        *TOP_KEYS,
    )
}  # fmt: skip
"""Keys of the top level."""
_PLATFORM = {"stages": _STAGES}
_DEEP_KEYS = frozenset({
    "default_sampling_params", "default_pooling_params", "subtalker_sampling_params",
    "engine_extras", "engine_args", "connectors", "platforms",
})  # fmt: skip

Node = dict[str, object]


@dataclass(frozen=True, slots=True)
class DeployFile:
    """A deploy file after inheritance.

    Attributes:
        top: settings of the stage that stand at the top level, as written.
        stage: stage 0 as written, empty where the file lists no stage.
        platform_stages: platform name -> stage 0 of its section, as written.
        no_effect: one line for each key of the top level that does nothing.
    """

    path: Path
    top: Mapping[str, object]
    stage: Mapping[str, object]
    platform_stages: Mapping[str, Mapping[str, object]]
    no_effect: tuple[str, ...]

    @property
    def origin(self) -> str:
        """What messages call the file as the place of a value."""
        return f"deploy file {self.path}"


def load_deploy_file(name: str | Path) -> DeployFile:
    """Read a deploy file; a bare file name is also looked up among the packaged ones.

    Raises:
        ConfigNotFoundError: if there is no such file.
        ConfigError: if it is not YAML, names a key twice, or does not describe one stage 0.
    """
    try:
        path = find_deploy_file(Path(name))
        raw = _read_with_bases(path, ())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"deploy config {sentence(error)}") from None
    tree = _checked(raw, TOP, str(path))
    return DeployFile(
        path,
        {key: tree[key] for key in _FOR_THE_STAGE if key in tree},
        _only_stage(tree, str(path)),
        _platform_stages(as_mapping(tree.get("platforms", {}), path), path),
        tuple(no_effect_notes(tree, TOP)),
    )


def _checked(tree: Node, known: Mapping[str, Setting], where: str) -> Node:
    wrong: list[str] = []
    unknown = [f"{key!r}{suggest(key, known, _in_the_stage)}" for key in tree if key not in known]
    given = {key: value for key, value in tree.items() if value is not None and key in known}
    for key, value in given.items():
        try:
            known[key].checked(value, key)
            known[key].refuse(value, key)
        except ConfigError as error:
            wrong.append(str(error))
    refuse_all(where, unknown, wrong)
    return given


def _in_the_stage(key: str) -> str:
    """How a key is named to a reader at the top level."""
    return key if key in TOP else f"{key} of the stage"


def _platform_stages(platforms: Node, path: Path) -> dict[str, Node]:
    found = {}
    for name, section in platforms.items():
        where = f"{path}: platforms.{name}"
        if name not in PLATFORMS:
            raise ConfigError(
                f"{path}: platforms: unknown platform {name!r}; must be {one_of(PLATFORMS)}"
            )
        found[name] = _only_stage(_checked(as_mapping(section, path), _PLATFORM, where), where)
    return found


def find_deploy_file(path: Path) -> Path:
    """The file itself, or the packaged one of the same bare name."""
    candidates = [expand_home(path)]
    if path.name == str(path):
        candidates.append(PACKAGED_DIR / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    packaged = ", ".join(sorted(file.name for file in PACKAGED_DIR.glob("*.yaml")))
    raise ConfigNotFoundError(
        f"Deploy config not found: {path} (looked at {looked}); packaged ones are {packaged}"
    )


def _only_stage(tree: Node, where: str) -> Node:
    stages = tree.get("stages", [])
    assert isinstance(stages, list), "a checked list"
    for stage in stages:
        if "stage_id" not in stage:
            raise ConfigError(f"{where}: each stage needs a stage_id")
        stage_id = shown(stage["stage_id"])
        if stage_id != "0":
            raise ConfigError(
                f"{where}: unknown stage_id {stage_id}; this pipeline has one stage, 0"
            )
    if len(stages) > 1:
        raise ConfigError(f"{where}: stage_id 0 is listed twice")
    return stages[0] if stages else {}


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> Node:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(str(file) for file in (*seen, path))
        raise ConfigError(f"base_config goes in a circle: {chain}")
    if not path.is_file():
        raise ConfigNotFoundError(f"Deploy config not found: {path} (base_config of {seen[-1]})")
    tree = read_mapping(path)
    base = tree.get("base_config")
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base_config must be a path, got {base!r}")
    return _overlay(_read_with_bases(path.parent / base, (*seen, path)), tree)


def _overlay(base: Node, over: Node, *, deep: bool = False) -> Node:
    """Overlay ``over``: stages by id and field by field, only some mappings deeply."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if key == "stages" and isinstance(below, list) and isinstance(value, list):
            merged[key] = _overlay_stages(below, value)
        elif (deep or key in _DEEP_KEYS) and isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _overlay(below, value, deep=True)
        else:
            merged[key] = value
    return merged


def _overlay_stages(base: list[object], over: list[object]) -> list[object]:
    merged = list(base)
    for stage in over:
        if not isinstance(stage, dict):
            merged.append(stage)
            continue
        for index, below in enumerate(merged):
            if isinstance(below, dict) and below.get("stage_id") == stage.get("stage_id"):
                merged[index] = _overlay(below, stage)
                break
        else:
            merged.append(stage)
    return merged
