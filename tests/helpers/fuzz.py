"""Messages and requests that go wrong in every way a client can think of, by a seeded generator."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random

from tests.helpers.socket_client import camera_event, start_message

ODD: tuple[object, ...] = (
    None, True, -1, 0, 2**63, -(2**70), 1e308, 1.5, "", " ", "\0", "\x1b[31m", "\ud83d", "é\u2028",
    "x" * 3000, "010", "NaN", "../../etc/passwd", [], {}, [[]], [None], {"a": {"b": [1]}},
    "data:image/png;base64,AAAA", "http://127.0.0.1:1/",
)  # fmt: skip
"""Values that some field somewhere does not expect."""
_RAW = (
    "", "{", "[]", "null", '"text"', '{"type": NaN}', '{"type": "session.ping", "type": "x"}',
    "[" * 500,
    '{"type": "session.stop"', "\0", "{}", '{"type": ["session.ping"]}', "9" * 5000,
)  # fmt: skip
_KINDS = (
    "application/json", "application/json; charset=x", "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b", "text/plain",
)  # fmt: skip
_PART = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\na\r\n--b--\r\n'
_BODIES = (
    b"", b"{", b"[" * 3000, b"&" * 300, b"prompt=a&prompt=b", b"\xff\xfe", _PART % b"prompt",
    _PART % b'\0"; filename="\xff',
)  # fmt: skip
_PROMPT = {"type": "session.interaction", "interaction": {"event": {"prompt": "a storm"}}}
_CONTROLS = (
    camera_event(), _PROMPT, {"type": "session.ping"}, {"type": "session.stop"},
    {"type": "session.reset", "prompt": "another", "seed": 3}, start_message(num_frames=9),
)  # fmt: skip


@dataclass
class Spoiler:
    """Draws input; the same seed draws the same."""

    random: Random
    kinds: tuple[object, ...] = field(default=ODD)

    def spoilt(self, value: object, share: float = 0.15) -> object:
        """A value with some of its parts replaced, left out or added."""
        if self.random.random() < share:
            return self.random.choice(self.kinds)
        if isinstance(value, dict):
            kept = {
                k: self.spoilt(v, share) for k, v in value.items() if self.random.random() > 0.05
            }
            if self.random.random() < share:
                kept[self.random.choice(("", "\0", "a.b", "\ud83d", "extra_params", "mode"))] = (
                    self.random.choice(self.kinds)
                )
            return kept
        if isinstance(value, list):
            return [self.spoilt(item, share) for item in value]
        return value

    def start(self) -> str:
        """The first message of a socket: often a good one."""
        if self.random.random() < 0.5:
            return json.dumps(start_message(num_frames=9, seed=self.random.randrange(9)))
        return json.dumps(self.spoilt(start_message(num_frames=9)))

    def control(self) -> str | bytes:
        """Any later message."""
        if self.random.random() < 0.15:
            return self.random.choice((*_RAW, b"\xff\x00"))
        return json.dumps(self.spoilt(self.random.choice(_CONTROLS)))

    def body(self) -> tuple[bytes, str]:
        """A body of a request, with its media type."""
        fields = {
            name: value for name, value in start_message(num_frames=9).items() if name != "type"
        }
        good = json.dumps(self.spoilt(fields, 0.1)).encode()
        kind = self.random.choice(_KINDS)
        raw = self.random.choice((good, good, good, *_BODIES))
        return raw, kind

    def headers(self) -> dict[str, bytes]:
        """Headers of a request that a proxy, a browser or nobody would send."""
        known = {
            "X-Request-Id": (b"a", b"\x1b", b"x" * 500, "é".encode()),
            "Range": (b"bytes=0-1", b"bytes=9-1", b"bytes=a", b"bytes=-", b"bytes=0-0,2-3"),
            "Authorization": (b"Bearer x", b"basic", b""),
            "If-None-Match": (b"*", b'"x"'),
            "Expect": (b"100-continue",),
            "Origin": (b"null", b"http://evil.example"),
        }
        names = self.random.sample(list(known), self.random.randrange(3))
        return {name: self.random.choice(known[name]) for name in names}

    def path(self, template: str, known_ids: list[str]) -> str:
        """A path with its parameters filled in, and a query."""
        ids = (*known_ids[-3:], "none", "%00", "..%2f..", "%ff", "x" * 300)
        filled = template.replace("{video_id}", self.random.choice(ids))
        query = self.random.choice(
            (
                "",
                "",
                "?limit=0",
                "?limit=-1",
                "?order=asc",
                "?after=none",
                "?limit=1&limit=2",
                "?%00=%ff",
            )
        )
        return filled + query
