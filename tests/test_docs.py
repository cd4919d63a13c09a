"""What the pages of docs/ and README.md name exists: files, flags, routes, metrics, codes."""

import importlib.util
import re
import shlex
import tomllib
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.helpers.fake_checkpoint import write_fake_checkpoint
from tests.helpers.http_server import NAME, tiny_deployment
from vllm_omni.config.resolve import resolve
from vllm_omni.config.server import ServerConfig
from vllm_omni.engine.metrics import EngineMetrics
from vllm_omni.entrypoints.cli.flags import FLAGS
from vllm_omni.entrypoints.engine_client import EngineClient
from vllm_omni.entrypoints.server.app import create_app
from vllm_omni.entrypoints.server.protocol import ErrorMessage
from vllm_omni.entrypoints.server.state import ServerState

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"cli.md", "deploy_yaml.md", "websocket_protocol.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "lingbot_world" / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
]
HTTP_PAGE = ROOT / "docs" / "reference" / "http_api.md"
RECIPE = ROOT / "docs" / "recipes" / "lingbot_world_v2.md"
TOP_FOLDERS = "vllm_omni|benchmarks|examples|tests|docs|docker|deploy"
PLACEHOLDERS = {"vllm_omni/a/b.py", "tests/a/test_b.py"}
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def ticked(page: Path) -> list[str]:
    """Everything between single backticks, outside code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def shell_lines(page: Path) -> list[list[str]]:
    """Commands of a page's shell blocks, in words."""
    found = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [words for block in found for line in _commands(block) if (words := shlex.split(line))]


def _commands(block: str) -> list[str]:
    joined, quoted = block.replace("\\\n", " "), ""
    commands = []
    for line in joined.split("\n"):
        quoted = f"{quoted}\n{line}" if quoted else line
        if quoted.count("'") % 2 == 0:
            commands.append(quoted)
            quoted = ""
    return commands


class _ParserTakenError(Exception):
    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@cache
def flags_of(script: str) -> frozenset[str]:
    """Flags of a script's own parser, caught when it parses."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def give_up(parser: ArgumentParser, *_: object, **__: object) -> None:
        raise _ParserTakenError(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", give_up)
        patch.syspath_prepend(str((ROOT / script).parent))
        spec.loader.exec_module(module)
        with pytest.raises(_ParserTakenError) as taken:
            vars(module)["parse_args" if "parse_args" in vars(module) else "main"]([])
    return frozenset(taken.value.parser._option_string_actions)


@by_page
def test_files_exist(page):
    paths = {word for text in ticked(page) for word in re.split(r"[\s,;=()]+", text)}
    named = {path for path in paths if re.match(rf"({TOP_FOLDERS})/[\w./-]+$", path)}
    missing = {path for path in named - PLACEHOLDERS if not (ROOT / path).exists()}
    assert missing == set()


@by_page
def test_scripts_exist_and_know_their_flags(page):
    for words in shell_lines(page):
        if words[0] != "python" or words[1] in {"-m", "-c"}:
            continue
        assert (ROOT / words[1]).is_file(), words[1]
        given = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
        assert given - flags_of(words[1]) == set()


@by_page
def test_modules_to_run_exist(page):
    text = page.read_text()
    modules = set(re.findall(r"python -m ((?:vllm_omni|benchmarks)[\w.]*)", text))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


DEPLOY_FILES = [
    block
    for page in PAGES
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    if "stages:" in block
]


@pytest.mark.parametrize("text", DEPLOY_FILES)
def test_a_deploy_file_of_a_page_is_one_of_the_server(text, tmp_path):
    file = tmp_path / "deploy.yaml"
    file.write_text(text.replace("backend: ray", "backend: mp"))  # Ray may not be installed here.
    model = write_fake_checkpoint(tmp_path / "model", heads=40)
    config = resolve(str(model), deploy_config=file, platform="cuda", visible_devices=8).config
    assert config.parallel.world_size == 4


SERVER_PAGES = [page for page in PAGES if page in {HTTP_PAGE, RECIPE} or page.name == "web_page.md"]


@pytest.mark.parametrize("page", SERVER_PAGES, ids=lambda page: page.name)
def test_flags_of_the_server_exist(page):
    known = {name for flag in FLAGS for name in flag.names}
    roofline = flags_of("benchmarks/lingbot_world/roofline.py")
    named = {word for text in ticked(page) for word in re.findall(r"--[a-z][a-z-]+", text)}
    assert named - known - roofline == set()
    assert len(named) >= 1


@pytest.fixture
def state():
    client = EngineClient.create(tiny_deployment(), model_name=NAME, warm_up=False)
    return ServerState(client, ServerConfig((NAME,), admin_keys=("operator",)))


def test_the_http_page_names_every_route(state):
    row = re.compile(r"^\| (`(?:GET|POST|DELETE|WS) [^|]+`) \|", re.MULTILINE)
    documented = {
        (method, path)
        for cell in row.findall(HTTP_PAGE.read_text())
        for method, path in re.findall(r"`(\w+) ([^`]+)`", cell)
    }
    schema = create_app(state).openapi()
    served = {(m.upper(), path) for path, item in schema["paths"].items() for m in item}
    assert documented - {("WS", "/v1/realtime/video")} == served


def test_the_http_page_names_every_metric():
    metrics = EngineMetrics("m")
    text = generate_latest(metrics.registry).decode()
    shown = set(re.findall(r"^# TYPE vllm_omni:(\w+) (\w+)", text, re.MULTILINE))
    shown = {(name, kind) for name, kind in shown if not name.endswith("_created")}
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (gauge|counter|histogram) \|",
        HTTP_PAGE.read_text(), re.MULTILINE,
    )  # fmt: skip
    documented = {(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == shown


def test_the_recipe_names_every_error_code():
    described = ErrorMessage.model_fields["code"].description or ""
    known = set(re.findall(r"\w+_\w+", described))
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:ends|goes on)", RECIPE.read_text(), re.MULTILINE)
    assert set(rows) == known


def test_every_dependency_has_its_reason_in_the_readme_and_uvicorns_inside_its_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    table = (ROOT / "README.md").read_text().partition("## Run-time dependencies")[2]
    rows = re.findall(r"^\| ([a-z].*?) \| \S", table.partition("\n## ")[0], re.MULTILINE)
    told = {re.match(r"[\w-]+", name)[0] for row in rows[1:] for name in row.split(", ")}
    assert told == set(needed)
    assert re.search(r"<0\.\d+$", needed["uvicorn"])
