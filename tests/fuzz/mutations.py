"""Mutations of a file's content: bytes are changed, cut or doubled, or a value in JSON is replaced.

`mutated` draws them from a seed. WORDS are bytes that are inserted, VALUES what replaces a value in JSON.
"""

import json
import random
from typing import Any

WORDS = (
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"\0", b"\xff", b"\xe2\x80\xa8"),
    *(b"null", b"true", b"NaN", b"-1", b"1e999", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"../../", b"#version"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, -1e308, 10**400, "", "x", "x" * 100_000, "1", "\0", "\ud800"),
    *([], {}, [[]], {"a": 1}, [None], "../../etc/passwd", "/etc/passwd", "<img src=x onerror=alert(1)>", "a" * 300),
)


def mutated(content: bytes, seed: int) -> bytes:
    """The content with one to three changes of bytes; for half of the seeds, if it is JSON, with another value."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        try:
            return json.dumps(_with_another_value(json.loads(content), rng)).encode()
        except ValueError:
            pass
    for _ in range(rng.randint(1, 3)):
        content = _with_other_bytes(content, rng)
    return content


def _with_other_bytes(content: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:first]
    if kind == 1:
        return content[:first] + content[last:]
    if kind == 2:
        return content[:last] + content[first:]
    if kind == 3:
        return content[:first] + rng.choice(WORDS) + content[first:]
    if kind == 4:
        return content[:first] + rng.randbytes(rng.randint(1, 8)) + content[first + 1 :]
    place = rng.randrange(max(1, len(content)))
    return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]


def _with_another_value(content: Any, rng: random.Random) -> Any:
    """The content with one value, at any depth, replaced, removed, or put under another value's key."""
    if isinstance(content, dict) and content and rng.random() < 0.9:
        key = rng.choice([*content])
        if rng.random() < 0.1:
            return {name: value for name, value in content.items() if name != key}
        name = rng.choice([*content, "x", "__class__"]) if rng.random() < 0.1 else key
        return content | {name: _with_another_value(content[key], rng)}
    if isinstance(content, list) and content and rng.random() < 0.9:
        place = rng.randrange(len(content))
        return [*content[:place], _with_another_value(content[place], rng), *content[place + 1 :]]
    return rng.choice(VALUES)
