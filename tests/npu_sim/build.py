"""Compiles the simulated Ascend runtime with gcc, under the names that torch_npu links against.

Entry points that torch_npu needs to load, but that no test uses, become functions that return 0;
their names are read from the wheel itself. Everything else that it looks up by name and does not
find here stays missing, and using it is an error.
"""

import hashlib
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
LIBRARY = "libascendcl.so"
ALIASES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so",
           "libacl_tdt_channel.so")  # fmt: skip
"""Further names that the wheel asks the loader for; each leads to the one library."""

_PREFIXES = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl)\w+")


def built_runtime() -> Path:
    """Directory of the compiled libraries, made when sources or wheel have changed."""
    wheel = Path(str(find_spec("torch_npu").origin)).parent
    digest = hashlib.sha256(str(wheel).encode())
    for source in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(source.read_bytes())
    folder = Path(__file__).parents[2] / "build" / "npu_sim" / digest.hexdigest()[:16]
    if not (folder / ALIASES[-1]).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(folder, wheel)
    return folder


def _compile(folder: Path, wheel: Path) -> None:
    sources = sorted(SOURCES.glob("*.c"))
    missing = sorted(_needed(wheel) - _defined(sources))
    stubs = folder / "stubs.c"
    stubs.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in missing))
    _gcc(folder, LIBRARY, *(str(source) for source in sources), str(stubs))
    for alias in ALIASES:
        _gcc(folder, alias, "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")


def _gcc(folder: Path, name: str, *arguments: str) -> None:
    """Written under another name first: several processes may build at once."""
    options = (
        "-std=gnu11",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wno-unused-parameter",
        "-pthread",
    )
    draft = folder / f".{name}.{id(arguments)}.{_process()}"
    subprocess.run(
        ["gcc", *options, f"-Wl,-soname,{name}", "-o", str(draft), *arguments], check=True
    )
    draft.replace(folder / name)


def _process() -> int:
    return int(Path("/proc/self").resolve().name)


def _needed(wheel: Path) -> set[str]:
    """Names of the vendor's libraries that the wheel's own ones cannot load without."""
    libraries = [*(wheel / "lib").glob("libt*.so"), *wheel.glob("_C*.so")]
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {line.split()[-1] for line in listing.stdout.splitlines() if " U " in line}
    return {name for name in names if _PREFIXES.fullmatch(name)}


def _defined(sources: list[Path]) -> set[str]:
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    return set(re.findall(r"^API [^;=]*?\b(\w+)\(", text, re.MULTILINE))


if __name__ == "__main__":
    print(built_runtime())
