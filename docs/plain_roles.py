"""Docstrings on the site: Sphinx's roles become plain code, as readers of the source see them."""

import re

import griffe

_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites every docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Turn a role into code, ``:class:`X``` into ``X``."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
