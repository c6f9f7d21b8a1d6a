"""HTML, in which nothing that a result file says is taken for a tag."""

from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """An element. The one place where text is made safe: all but Html is escaped, attributes too."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(inside)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))
