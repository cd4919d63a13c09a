"""YAML that means to its reader what it means to its writer.

YAML 1.1 reads 010 as eight, 1:30 as ninety, 1_000 as a thousand and 2024-01-01 as a day. Whoever
writes them means a text, or another number.
"""

import re
from pathlib import Path

import yaml

from vllm_omni.errors import ConfigError
from vllm_omni.wording import shown

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
    """A part of a file that has to be a mapping of names.

    Raises:
        ConfigError: if it is none.
    """
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
