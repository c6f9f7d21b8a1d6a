"""For mkdocstrings: a docstring's columns, `name  what it is`, become a list."""

import re

import griffe

COLUMNS = re.compile(r"(\w[\w.*/]*(?:, \w[\w.*/]*)*) {2,}(?=\S)")


class Legends(griffe.Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text):
    """Indented lines below such a line belong to it."""
    lines, inside = [], False
    for line in text.splitlines():
        if match := COLUMNS.match(line):
            lines += [] if inside else [""]
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines.append(f"- {names}: {line[match.end() :]}")
        elif inside and line.startswith("  "):
            lines[-1] += f" {line.strip()}"
            continue
        else:
            lines += ["", line] if inside and line else [line]
        inside = match is not None
    return "\n".join(lines)
