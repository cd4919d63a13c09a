"""Which metrics, labels and values a PromQL expression names: as much of it as our files use."""

import re
from dataclasses import dataclass

FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile"}
KEYWORDS = {"by", "and"}
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m"}
_STRING = r'"[^"]*"'
_MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({_STRING})")
_SELECTOR = re.compile(r"([a-zA-Z_][\w:]*)\s*(\{[^}]*\})?(?:\[[^\]]*\])?")
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """A metric with what it asks of its labels.

    Attributes:
        matchers: label, operator and value.
    """

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """All metrics of an expression; fails on a word that is no metric and no known function."""
    found = []
    for match in _SELECTOR.finditer(_GROUPING.sub("", expression)):
        name, braces = match.groups()
        if expression_goes_on_with_call(match):
            assert name in FUNCTIONS, f"unknown function {name} in {expression}"
        elif name not in KEYWORDS:
            matchers = [(m[1], m[2], m[3].strip('"')) for m in _MATCHER.finditer(braces or "")]
            found.append(Selector(name, tuple(matchers)))
    return found


def expression_goes_on_with_call(match: re.Match[str]) -> bool:
    """Whether a word is followed by a parenthesis."""
    return match.string[match.end() :].lstrip().startswith("(")


def grouped_by(expression: str) -> set[str]:
    """Labels of all ``by (...)``."""
    return {label.strip() for inner in _GROUPING.findall(expression) for label in inner.split(",")}


def filled_in(expression: str) -> str:
    """A panel's expression as Grafana sends it with everything chosen."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return re.sub(r'"\$\w+"', '".*"', expression)
