"""Deploy files: finding, reading, inheritance and ``${...}`` references."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from vllm_omni.config.deployment import DeploySection, PlatformSection
from vllm_omni.config.schema import parse_section
from vllm_omni.errors import ConfigError, ConfigNotFoundError

PACKAGED_DIR = Path(__file__).resolve().parents[1] / "deploy"
STAGE_ID = 0
_DEEP_KEYS = frozenset({
    "default_sampling_params", "default_pooling_params", "subtalker_sampling_params",
    "engine_extras", "engine_args", "connectors", "platforms",
})  # fmt: skip
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_PATH = re.compile(r"\w+(\.\w+)*")

Node = dict[str, object]


@dataclass(frozen=True, slots=True)
class DeployFile:
    """A deploy file after inheritance and references.

    Attributes:
        stage: stage 0 as written, empty where the file lists no stage.
        platform_stages: platform name -> stage 0 of its section, as written.
    """

    path: Path
    top: DeploySection
    stage: Mapping[str, object]
    platform_stages: Mapping[str, Mapping[str, object]]


def load_deploy_file(name: str | Path) -> DeployFile:
    """Read a deploy file; a bare file name is also looked up among the packaged ones.

    Raises:
        ConfigNotFoundError: if there is no such file.
        ConfigError: if it is not YAML, names a key twice, refers to nothing, or does not
            describe one stage 0.
    """
    path = find_deploy_file(Path(name))
    tree = _resolve_references(_read_with_bases(path, ()), path)
    top = parse_section(DeploySection, tree, where=str(path))
    platforms = {
        platform: _only_stage(
            parse_section(
                PlatformSection, _as_node(section, path), where=f"{path}: platforms.{platform}"
            ).stages,
            f"{path}: platforms.{platform}",
        )
        for platform, section in (top.platforms or {}).items()
    }
    return DeployFile(path, top, _only_stage(top.stages, str(path)), platforms)


def find_deploy_file(path: Path) -> Path:
    """The file itself, or the packaged one of the same bare name."""
    candidates = [path.expanduser()]
    if path.name == str(path):
        candidates.append(PACKAGED_DIR / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise ConfigNotFoundError(f"Deploy config not found: {path} (looked at {looked})")


def _only_stage(stages: list[Node] | None, where: str) -> Node:
    found: Node | None = None
    for stage in stages or []:
        if "stage_id" not in stage:
            raise ConfigError(f"{where}: each stage needs a stage_id")
        if stage["stage_id"] != STAGE_ID or isinstance(stage["stage_id"], bool):
            raise ConfigError(
                f"{where}: unknown stage_id {stage['stage_id']!r}; this pipeline has one stage, 0"
            )
        if found is not None:
            raise ConfigError(f"{where}: stage_id 0 is listed twice")
        found = stage
    return {} if found is None else found


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> Node:
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(str(file) for file in (*seen, path))
        raise ConfigError(f"base_config goes in a circle: {chain}")
    if not path.is_file():
        raise ConfigNotFoundError(f"Deploy config not found: {path} (base_config of {seen[-1]})")
    tree = _read(path)
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


def _read(path: Path) -> Node:
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), path, set())
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {detail}") from None
    return _as_node({} if tree is None else tree, path)


def _refuse_repeated_keys(node: yaml.Node | None, path: Path, done: set[int]) -> None:
    """YAML itself forbids a repeated key, but the reader would let the last one win."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in done:
        return
    done.add(id(node))
    if not isinstance(node, yaml.MappingNode):
        children = node.value
    else:
        children = [part for pair in node.value for part in pair]
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{path}: line {line}: key {key.value!r} is given twice")
            seen.add(str(key.value))
    for child in children:
        _refuse_repeated_keys(child, path, done)


def _as_node(value: object, path: Path) -> Node:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path} must be a mapping with names as keys, got {value!r}")
    return value


def _resolve_references(tree: Node, path: Path) -> Node:
    """Replace ``${key.path}``, an absolute path in the same file, by what stands there."""
    return _as_node(_Resolver(tree, path).resolve(tree, ()), path)


@dataclass(frozen=True, slots=True)
class _Resolver:
    tree: Node
    path: Path

    def resolve(self, value: object, open_references: tuple[str, ...]) -> object:
        if isinstance(value, dict):
            return {key: self.resolve(below, open_references) for key, below in value.items()}
        if isinstance(value, list):
            return [self.resolve(below, open_references) for below in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole is not None:
            return self._look_up(whole[1], open_references)
        text = _REFERENCE.sub(lambda match: str(self._look_up(match[1], open_references)), value)
        if "${" in text:
            raise ConfigError(f"{self.path}: cannot read the reference in {value!r}")
        return text

    def _look_up(self, reference: str, open_references: tuple[str, ...]) -> object:
        if reference in open_references:
            raise ConfigError(f"{self.path}: the reference ${{{reference}}} goes in a circle")
        if _PATH.fullmatch(reference) is None:
            raise ConfigError(
                f"{self.path}: ${{{reference}}} is not supported; a reference is a path of keys "
                "from the top of the file, for example ${dtype} or ${stages.0.devices}"
            )
        node: object = self.tree
        for part in reference.split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise ConfigError(f"{self.path}: ${{{reference}}} refers to nothing")
        return self.resolve(node, (*open_references, reference))
