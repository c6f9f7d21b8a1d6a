"""For mkdocstrings: lines `name  what it is` of a docstring, such as those on parameters, become a list in Markdown."""

import re

import griffe

# The beginning of such a line: names with commas between them, then two spaces or more.
COLUMNS = re.compile(r"(\w[\w.*/]*(?:, \w[\w.*/]*)*) {2,}(?=\S)")


class Legends(griffe.Extension):
    """The extension of griffe, mkdocstrings' reader of sources, which mkdocs.yml names."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text):
    """A docstring with its lines `name  what it is` as a list. Indented lines below such a line continue it."""
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
