"""What tests read from pages of the documentation."""

import re
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
