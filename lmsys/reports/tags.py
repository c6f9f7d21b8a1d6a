"""HTML, in which nothing that a result file says is taken for a tag."""

from collections.abc import Iterable
from html import escape

NO_END = {"img", "input", "li", "tbody", "td", "th", "thead", "tr"}  # as these stand in our pages


class Html(str):
    """Text that is HTML already."""


def tag(name: str, *inside: str, **attributes: str) -> Html:
    """An element. The one place where text is made safe: all but Html is escaped, attributes too.

    End tags that the HTML standard lets a writer omit (13.1.2.4) are omitted, a tenth of a page's bytes.
    """
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(inside)}" + (f"</{name}>" if name not in NO_END else ""))


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))
