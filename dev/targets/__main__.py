"""`python -m dev.targets mine.py:f` compiles the Triton kernels of f for each card (kind of GPU). It needs no GPU.

The command prints whether the kernels compile and fit, their shared memory, registers, spills and so on. TARGET is one
of three: the name of an attention row of lmsys; a function of q, k, v, as `lmsys check` takes it; or a function without
parameters, which makes its own tensors with device="cuda" and calls your kernels. TARGET is called once for each card.
Its launches are not run, but recorded, with every configuration of an autotuner, and compiled for that card. A kernel
that compiles and fits may be slow, and inputs of other sizes or options may launch other kernels. Exit codes: 0 every
kernel fits in some configuration on each card, 1 one does not, 2 an unknown target or option.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from dev.targets.answers import Answer, answers_by_card
from dev.targets.cards import CARDS, KIB
from lmsys import commands, values

SCHEMA = 1  # the version of the JSON lines, which docs/targets.md describes
DTYPES, HEADS = ("float16", "bfloat16", "float32"), 4  # of attention's inputs: values of --dtype, and how many heads
# {option of Triton's compiler: its word in the table}
NAMES = {"num_warps": "warps", "num_stages": "stages", "num_ctas": "CTAs"}
NUMBERS = "registers", "spills", "tensor cores", "copies", "blocks"  # columns, named after facts of an `Answer`
HEAD = "card", "kernel", "fits", "shared KiB", *NUMBERS
WIDTHS = 7, 24, 8, 10, 9, 9, 12, 6, 6, 0  # of the columns; the last is the configuration, without a name in HEAD


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dev.targets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help="path.py:attribute, or a row of attention by its name")
    parser.add_argument("--card", default=",".join(CARDS), metavar="CARDS", help=f"of {','.join(CARDS)}; default: all")
    parser.add_argument("--head-dim", type=int, default=64, metavar="D", help="of attention; default: 64")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="of its sequences; default: 1024")
    parser.add_argument("--dtype", default="float16", metavar="DTYPE", help="of its tensors; default: float16")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--all", action="store_true", help="a line for each configuration")
    parser.add_argument("--json", action="store_true", help="a JSON object in a line for each: docs/targets.md")
    given = parser.parse_args(arguments)
    answers: list[Answer] = []
    try:
        values.hold(
            (importlib.util.find_spec("triton"), f"Triton is not installed here: {commands.with_extra('triton')}")
        )
        chosen = [CARDS[values.one_of("--card", name, CARDS)] for name in dict.fromkeys(given.card.split(","))]
        values.one_of("--dtype", given.dtype, DTYPES)
        values.whole("--head-dim", given.head_dim, least=1, most=512)
        values.whole("--length", given.length, least=1, most=2**16)
        shape = 1, HEADS, given.length, given.head_dim
        for of_card in answers_by_card(chosen, given.target, shape, given.dtype, not given.forward):
            if given.json:
                print(*(json.dumps({"schema": SCHEMA, **answer}) for answer in of_card), sep="\n", flush=True)
            else:
                print(*_table(of_card, given.all, begins=not answers), sep="\n", flush=True)
            answers += of_card
    except ValueError as error:
        return commands.refused(parser.prog, error)
    # 1 if some kernel has no answer without a reason why it does not fit: ">" is "a proper superset of".
    kernels = {(x["card"], x["kernel"]) for x in answers}
    return int(kernels > {(x["card"], x["kernel"]) for x in answers if x["reason"] is None})


def _table(answers: list[Answer], each: bool, begins: bool) -> list[str]:
    """The lines of a card: one for each kernel, or with `each` one for each configuration of a kernel.

    A line says how many configurations fit, and the range of their numbers; if none fits, the range over all. Lines
    below it say why the others do not fit. With `begins` the head of the table comes first.
    """
    groups: dict[Any, list[Answer]] = {}
    for number, x in enumerate(answers):
        groups.setdefault(number if each else x["kernel"], []).append(x)
    lines = [_line(HEAD)] if begins else []
    for group in groups.values():
        first, fit = group[0], [x for x in group if x["reason"] is None]
        shown = fit or group
        cells = [_range([x["needs"] and x["needs"] / KIB for x in shown])]
        cells += [_range([x[name.replace(" ", "_")] for x in shown]) for name in NUMBERS]
        configuration = _configuration(first["constants"]) if each else ""
        lines.append(_line([first["card"], first["kernel"], f"{len(fit)} of {len(group)}", *cells, configuration]))
        lacking = {f"{first['card']} has no {x['lacks']} in hardware" for x in group if x["lacks"]}
        lines += [f"    {text}" for text in (*dict.fromkeys(x["reason"] for x in group if x["reason"]), *lacking)]
    return lines


def _configuration(constants: dict[str, Any]) -> str:
    """A kernel's constants in words, such as "BLOCK 64, warps 4"; num_ctas is left out if it is 1."""
    return ", ".join(f"{NAMES.get(name, name)} {x}" for name, x in constants.items() if (name, x) != ("num_ctas", 1))


def _range(numbers: list[Any]) -> str:
    """The smallest and the largest number, such as "4-8", or "4" if all are equal; None does not count.

    It is "" without any number, and "no", "yes" or "no-yes" for booleans.
    """
    known = sorted(x for x in numbers if x is not None)
    texts = [("no", "yes")[x] if isinstance(x, bool) else f"{x:.0f}" for x in known[:1] + known[-1:]]
    return "-".join(dict.fromkeys(texts))


def _line(cells: Sequence[str]) -> str:
    """The cells of a line, side by side in columns."""
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=False)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
