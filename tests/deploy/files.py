"""The files that operators deploy with, read as their programs read them."""

from __future__ import annotations

import json
import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import yaml

from vllm_omni.config.deploy_file import find_deploy_file
from vllm_omni.config.server import ServerConfig
from vllm_omni.entrypoints.cli.flags import typed_values
from vllm_omni.entrypoints.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "compose.yaml"
COMPOSE_CUDA = ROOT / "docker" / "compose.cuda.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "vllm-omni.service"
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "lingbot_world.json"
DEFAULTS = ServerConfig(("m",))
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-?])([^}]*))?\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction of the Dockerfile, its lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments: those of a JSON list, or those of a shell line without options."""
        if self.text.startswith("["):
            return json.loads(self.text)
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def stages() -> list[list[Instruction]]:
    """The Dockerfile, cut before every FROM; what stands before the first comes first."""
    lines = [line for line in DOCKERFILE.read_text().split("\n") if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found: list[list[Instruction]] = [[]]
    for line in filter(None, joined.split("\n")):
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, text.strip()))
    return found


def of_kind(stage: list[Instruction], name: str) -> list[Instruction]:
    """All instructions of one name."""
    return [instruction for instruction in stage if instruction.name == name]


def image_environment() -> dict[str, str]:
    """ENV of the image."""
    pairs = [word for env in of_kind(stages()[-1], "ENV") for word in env.words]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def compose(*paths: Path, **variables: str) -> dict:
    """A compose file with its variables replaced, those after it merged over it."""
    merged: dict = {}
    for path in paths:
        text = _VARIABLE.sub(lambda match: _value_of(match, variables), path.read_text())
        _merge(merged, yaml.safe_load(text))
    return merged


def _value_of(match: re.Match[str], variables: dict[str, str]) -> str:
    name, kind, text = match.groups()
    if name in variables:
        return variables[name]
    assert kind == "-", f"{match[0]} needs a value"
    return text


def _merge(target: dict, over: dict) -> None:
    """As Compose merges services: commands are replaced, other lists go on."""
    for key, value in over.items():
        known = target.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            _merge(known, value)
        elif isinstance(value, list) and isinstance(known, list) and key != "command":
            target[key] = [*known, *value]
        else:
            target[key] = value


def manifest(name: str) -> dict:
    """A Kubernetes manifest."""
    return yaml.safe_load((KUBERNETES / f"{name}.yaml").read_text())


def pod() -> dict:
    """The pod of the deployment."""
    return manifest("deployment")["spec"]["template"]["spec"]


def server_container() -> dict:
    """Its only container."""
    (container,) = pod()["containers"]
    return container


def unit() -> dict[str, list[str]]:
    """All settings of the systemd unit, by name."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def unit_command(**changes: str) -> list[str]:
    """ExecStart as systemd starts it, its variables replaced."""
    defaults = dict(word.split("=", 1) for line in unit()["Environment"] for word in line.split())
    (line,) = unit()["ExecStart"]
    return [_VARIABLE.sub(lambda match: (defaults | changes)[match[1]], w) for w in line.split()]


def server_commands() -> dict[str, list[str]]:
    """Every command line that starts a server, without the program's name."""
    (cmd,) = of_kind(stages()[-1], "CMD")
    cuda = {"MODEL_DIR": "/srv/lingbot"}
    four = cuda | {"GPUS": "4", "DEPLOY_CONFIG": "usp4_compiled.yaml"}
    return {
        "Dockerfile": cmd.words,
        "compose.yaml": compose(COMPOSE)["services"]["server"]["command"],
        "compose.cuda.yaml": compose(COMPOSE, COMPOSE_CUDA, **cuda)["services"]["server"][
            "command"
        ],
        "compose.cuda.yaml, four": compose(COMPOSE, COMPOSE_CUDA, **four)["services"]["server"][
            "command"
        ],
        "kubernetes": server_container()["args"],
        "systemd": unit_command()[1:],
    }


@dataclass(frozen=True)
class ServeLine:
    """What a command line of ``serve`` asks for, by the parser that the server uses.

    Attributes:
        typed: values of the server's flags that are on the line.
        deploy_config: the deploy file as a file of this repository.
    """

    model: str
    typed: dict[str, object]
    deploy_config: Path

    @property
    def shutdown_timeout_s(self) -> float:
        """How long the server takes to end, at most."""
        return float(str(self.typed.get("shutdown_timeout_s", DEFAULTS.shutdown_timeout_s)))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(str(self.typed.get("port", DEFAULTS.port)))


def parse_serve(line: list[str]) -> ServeLine:
    """Read a command line; an argparse error if the server would refuse it."""
    name, *rest = line
    assert name == "serve"
    assert "--omni" in rest
    module = import_module(COMMANDS[name].module)
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    args = parser.parse_args([word for word in rest if word != "--omni"])
    given = typed_values(args, "serve")
    return ServeLine(
        model=str(given["model_tag"]),
        typed=typed_values(args, "server"),
        deploy_config=find_deploy_file(in_repository(str(given["deploy_config"]))),
    )


def in_repository(name: str) -> Path:
    """A file of the image's file system, where it is copied from; other names as they are."""
    for copy in of_kind(stages()[-1], "COPY"):
        *sources, target = copy.words
        if name.startswith(f"{target}/") and not copy.text.startswith("--from"):
            return ROOT / sources[0] / Path(name).name
    return Path(name)


def panels() -> list[dict]:
    return [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]


def alerts() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
