"""What compiling at run time needs of the machine, found out without compiling anything."""

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from vllm_omni import envs

_COMPILERS = ("gcc", "clang")


def missing_for_compiling(device: str) -> tuple[str, ...]:
    """Name what ``torch.compile`` would miss on this machine, in the operator's words.

    Triton builds the launcher of each kernel with a C compiler against Python's headers.
    """
    chosen = envs.c_compiler()
    headers = Path(sysconfig.get_paths()["include"])
    found = {
        f"a C compiler ({' or '.join(_COMPILERS) if chosen is None else f'CC={chosen}'})": any(
            map(shutil.which, _COMPILERS if chosen is None else (chosen,))
        ),
        f"Python.h (in {headers})": (headers / "Python.h").is_file(),
    }
    if device == "cuda":
        found["the package triton"] = find_spec("triton") is not None
    return tuple(name for name, is_here in found.items() if not is_here)
