"""Reads the pages for users, README.md, CONTRIBUTING.md and docs/: their commands, links, headings and code blocks.

Tests of pages run the commands, and check that links lead somewhere. If a page starts a new program, add it to PROGRAMS
and `module_of`.
"""

import re
import shlex
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch

from benchmarks.sweeps import SWEEPS
from lmsys.bench.__main__ import line_of
from lmsys.commands import COMMANDS
from tests.support.processes import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROGRAMS = re.compile(
    r"(\w+=\S+ )*(python3?|torchrun|pip|nox|uv|lmsys(?= (?:bench|check|report|verify|train) |$)|mkdir"
    r"|\.nox/\w+/bin/python)( |$)"
)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return [dedent(code) for kind, code in FENCE.findall(PAGES[page]) if kind == language]


def spans(page: str) -> list[str]:
    """The texts between single backticks, each joined to a single line."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", FENCE.sub("", PAGES[page]))]


def commands(page: str) -> Iterator[list[str]]:
    """Yields the words of each command in a page's shell blocks and between backticks: a and b of `a && b > file`."""
    return (words for words, _ in with_files(page))


def with_files(page: str) -> Iterator[tuple[list[str], str]]:
    """Yields (words, file) of each command, as `commands`; its output goes to the file, if that is not ""."""
    lines = [line for code in blocks(page, "sh") for line in code.splitlines()]
    lines += [text for text in spans(page) if PROGRAMS.match(text)]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            written = words.index(">") if ">" in words[:end] else end
            yield words[:written], " ".join(words[written + 1 : end])
            words = words[end + 1 :]


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """(module, arguments) of a command, however it is started; the module is "" if tests do not check the command."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *rest = words
    program = re.sub(r"^\.nox/\w+/bin/lmsys$", "lmsys", program)
    if program == "lmsys" and rest[:1] == ["bench"] and rest[1:]:
        return "pytest", line_of(rest[1:])[2:]
    if program == "lmsys" and rest[:1] == ["--help"]:
        return "", rest
    if program == "lmsys":
        return (COMMANDS[rest[0]].module if rest else "lmsys.here"), rest[1:]
    if program in ("pip", "nox"):
        return program, rest
    if program == "uv":
        assert rest[:2] == ["run", "noxfile.py"]
        return "nox", rest[2:]
    starts_a_users_file = program == "torchrun" and rest[-1].endswith(".py")
    if (
        program in ("mkdir", "cp", "cd", "git", ".", "pytest-benchmark")
        or words[:2] == ["nsys", "stats"]
        or starts_a_users_file
    ):
        return "", rest
    if program in ("nsys", "ncu"):  # profilers, in front of the command that they profile
        return module_of(words[words.index("python") :])
    assert program.endswith(("python", "python3", "torchrun")) and "-m" in rest, f"{words} is no command known here"
    place = rest.index("-m")
    assert program == "torchrun" or place == 0
    return rest[place + 1], rest[place + 2 :]


def without(words: list[str], *options: str) -> list[str]:
    """The words without these options and their values."""
    kept = iter(word for word in words if not word.startswith(tuple(f"{option}=" for option in options)))
    return [word for word in kept if word not in options or not next(kept)]


def waits_for_a_gpu(words: list[str]) -> bool:
    """True if, on this machine without a GPU, a command selects a section that only the sweep for GPUs has."""
    sweep = SWEEPS[words[words.index("--sweep") + 1] if "--sweep" in words else "default"]
    chosen = re.findall(r"\w+", words[words.index("-k") + 1]) if "-k" in words else []
    return DEVICE == "cpu" and any(word in sections(sweep["cuda"]) - sections(sweep["cpu"]) for word in chosen)


def sections(sweep: Any) -> set[str]:
    """The names of a sweep's grids."""
    return {grid.name for grids in sweep.grids.values() for grid in grids}


def links(page: str) -> list[tuple[str, str]]:
    """(file in the repository, anchor) of each link of a page into the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page]))
    here = Path(page).parent
    split = [link.partition("#") for link in targets if not link.startswith(("http://", "https://"))]
    return [(normpath(here / path) if path else page, anchor) for path, _, anchor in split]


def anchors(text: str) -> set[str]:
    """The anchors of a text's headings."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}
