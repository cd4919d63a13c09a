"""Limits on the size and the habits of the code, without exemptions."""

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("vllm_omni", "benchmarks", "examples", "docs")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12
MIN_SUMMARY_WORDS = 5
ENVIRONMENT_FILE = "vllm_omni/envs.py"
NPU_FILES = {
    "vllm_omni/platforms/npu.py",
    "vllm_omni/diffusion/attention/npu_fusion.py",
}
CATCH_SITES = {
    "vllm_omni/diffusion/worker/worker.py:_closing",
    "vllm_omni/diffusion/worker/process.py:_reporting",
}
"""``path:function`` of the handlers that catch everything and do not raise again. There may be
two: the one that ends a session and the one that ends a process."""

TEST_AS_LIBRARY = re.compile(
    r"^\s*(?:from|import) tests\.(?:\w+\.)*(?:test|check)_\w+"
    r"|^\s*from tests[.\w]* import .*\btest_",
    re.MULTILINE,
)
"""An import of a test module, also in a script that a test writes."""

Rule = Callable[[str, ast.Module], Iterator[tuple[int, str]]]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


def called_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None


def long_functions(_path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for function in functions(tree):
        if line_count(function) > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {line_count(function)} lines"


def probing_attributes(_path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``hasattr`` and ``getattr`` with a default: ask for the type instead."""
    for node in ast.walk(tree):
        if called_name(node) == "hasattr":
            yield node.lineno, "hasattr"
        if called_name(node) == "getattr" and len(node.args) > 2:
            yield node.lineno, "getattr with a default"


def reading_the_environment(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path == ENVIRONMENT_FILE:
        return
    names = {"environ", "environb", "getenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno, f"os.{node.attr}"
        if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}:
            yield node.lineno, f"from {node.module} import an accessor of the environment"


def naming_torch_npu(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path in NPU_FILES:
        return
    for node in ast.walk(tree):
        imported = isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] == "torch_npu" for alias in node.names
        )
        imported_from = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == (
            "torch_npu"
        )
        named = isinstance(node, ast.Constant) and node.value == "torch_npu"
        if imported or imported_from or named:
            yield node.lineno, "torch_npu"


def asking_a_tensor_what_it_is(_path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """A device is asked by ``device.type``; ``is_npu`` exists only where torch_npu is loaded."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "is_npu":
            yield node.lineno, "is_npu"


def catching_everything(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for function in functions(tree):
        for node in ast.walk(function):
            if (
                isinstance(node, ast.ExceptHandler)
                and _is_broad(node.type)
                and not _raises_again(node)
                and f"{path}:{function.name}" not in CATCH_SITES
            ):
                yield node.lineno, f"{function.name} catches everything"


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        isinstance(name, ast.Name) and name.id in {"Exception", "BaseException"} for name in names
    )


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def describing_nothing(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """A docstring says what a reader cannot see in the name; a method that only fills in an
    interface carries ``@override`` and none."""
    if not path.startswith("vllm_omni/"):
        return
    described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, described) else None
        if text is None:
            continue
        summary = text.split("\n\n")[0]
        if len(summary.split()) < MIN_SUMMARY_WORDS or "See :" in text:
            line = 1 if isinstance(node, ast.Module) else node.lineno
            yield line, f"docstring {summary!r}"


RULES: tuple[Rule, ...] = (
    long_functions,
    probing_attributes,
    reading_the_environment,
    naming_torch_npu,
    asking_a_tensor_what_it_is,
    catching_everything,
    describing_nothing,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_the_rule(rule):
    broken = []
    for path in python_files(*PRODUCT):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(), filename=name)
        broken += [f"{name}:{line}: {what}" for line, what in rule(name, tree)]
    assert broken == []


def test_no_file_is_long():
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in python_files(*PRODUCT, "tests")
    }
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_no_test_module_is_a_library():
    """What several test modules need lives in ``tests/helpers``, or beside them by another name."""
    importing = [
        path.relative_to(ROOT).as_posix()
        for path in python_files("tests", "benchmarks", "examples")
        if TEST_AS_LIBRARY.search(path.read_text())
    ]
    assert importing == []
    for offence in (
        "from tests.a.test_b import c",
        "import tests.a.check_b",
        "from tests.a import test_b",
    ):
        assert TEST_AS_LIBRARY.search(f"x = 1\n    {offence}\n")
    assert not TEST_AS_LIBRARY.search("from tests.helpers.mark import hardware_test\n")


def test_most_functions_are_short():
    lengths = [
        line_count(function)
        for path in python_files(*PRODUCT)
        for function in functions(ast.parse(path.read_text()))
    ]
    assert len(lengths) > 100
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_there_are_at_most_two_catch_sites_and_each_is_real():
    assert len(CATCH_SITES) <= 2
    for site in CATCH_SITES:
        path, name = site.split(":")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {function.name for function in functions(tree)}


OFFENCES = {
    long_functions: "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES,
    probing_attributes: "getattr(a, 'b', None)",
    reading_the_environment: "import os\nos.environ['A']",
    naming_torch_npu: "import_module('torch_npu')",
    asking_a_tensor_what_it_is: "x.is_npu",
    catching_everything: "def f():\n try: g()\n except (OSError, Exception): pass",
    describing_nothing: 'def f():\n    """See :class:`Interface`, the place where f is."""',
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_finds_an_offence_and_passes_clean_code(rule):
    assert list(rule("vllm_omni/x.py", ast.parse(OFFENCES[rule])))
    clean = "import os\ndef f(a):\n try: getattr(a, 'b')\n except Exception:\n  g()\n  raise\n"
    assert not list(rule("vllm_omni/x.py", ast.parse(clean)))
