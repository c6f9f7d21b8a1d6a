"""`lmsys check` on attention (lmsys/check): right functions pass, and for wrong ones the mistake is named.

These tests are about the report and the command: test_mistakes.py has the wrong functions, of all kinds. The functions
here are in tests/support/wrong_kernels.py: `entry(name)` is the row of a function of that file.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import Pattern
from lmsys.attention.naive import naive
from lmsys.check import __main__ as command
from lmsys.check import attention
from lmsys.check import question as places
from lmsys.check.__main__ import main
from lmsys.check.kinds import KINDS, RIGHT, WRONG, Kind, check
from lmsys.check.question import Options
from lmsys.processes import Worker
from lmsys.registry import Entry, Table, load_target
from tests.support import wrong_kernels

FILE = Path(wrong_kernels.__file__)


def entry(name: str) -> Entry:
    """The row of a function in tests/support/wrong_kernels.py."""
    return Entry(name, f"{FILE}:{name}")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process that tests share which do not look at its own output: to import torch takes more than a second."""
    with Worker() as shared:
        yield shared


# Right functions: (name, parameters that it has not got, how its results repeat)
RIGHT_ONES = [
    ("right", set(), "yes; alone as in a batch of 2: "),
    ("of_a_course", {"scale"}, "yes; alone as in a batch of 2: "),
    ("without_a_mask", {"scale", "causal"}, "yes; alone as in a batch of 2: "),
    ("any_order", set(), "no (o); "),
    ("by_batch", set(), "yes; alone as in a batch of 2: no (o)\n"),
    *(
        pytest.param(name, set(), "yes; ", marks=pytest.mark.on_request)
        for name in ("right_by_tiles", "right_by_small_tiles")
    ),
]


@pytest.mark.parametrize(("name", "lacks", "repeats"), RIGHT_ONES)
def test_what_is_right_passes(name: str, lacks: set[str], repeats: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A row without a mask is asked no causal case, not even among the extreme inputs, which come last."""
    options = Options(16, grad=name.startswith("right"), dtypes=("float32",))
    assert check(entry(name), options) == RIGHT
    printed_text = capsys.readouterr().out
    asked = [question for question in attention.questions(entry(name), options) if question.reason is None]
    assert printed_text.count(": right\n") == len(asked)
    assert {parameter for parameter in ("scale", "causal") if f"it takes no {parameter}" in printed_text} == lacks
    assert ("causal, float32" in printed_text) == ("causal" not in lacks)
    assert f"the same bits in 3 calls: {repeats}" in printed_text


def with_options(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, window: int | None = None,
    sinks: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, window, sinks=sinks, return_lse=return_lse))


# `with_options` is right; each of the next three is wrong in one option.
def off_by_one(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, window: int | None = None) -> Any:
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, window and window + 1))


def of_first_head(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, sinks: Any = None) -> Any:
    return naive(q, k, v, scale=scale, pattern=Pattern(causal, sinks=None if sinks is None else sinks[:, :1]))


def without_gradient(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: Any, return_lse: bool = False) -> Any:
    outputs = naive(q, k, v, scale=scale, pattern=Pattern(causal, return_lse=return_lse))
    return (outputs[0], outputs[1].detach() + 0 * q.sum()) if return_lse else outputs


@pytest.mark.parametrize("name", ["with_options", "off_by_one", "of_first_head", "without_gradient"])
def test_a_row_is_asked_for_the_options_that_it_has_a_parameter_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Entry(name, f"{__file__}:{name}")
    assert check(row, Options(32, dtypes=("float32",))) == (RIGHT if name == "with_options" else WRONG)
    printed_text = capsys.readouterr().out
    wrong = {"off_by_one": "with window", "of_first_head": "with sinks", "without_gradient": "with return_lse"}
    assert name == "with_options" or f"{wrong[name]}, float32: wrong" in printed_text, printed_text
    assert "with softcap" not in printed_text


# A norm that takes stdout away, each time in another way: when its file is imported, and in each of its calls.
NORM = """import contextlib, itertools, os, sys
harms = itertools.cycle([lambda: sys.stdout.close(), lambda: setattr(sys, "stdout", None), lambda: os.close(1)])
next(harms)()
def norm(x, weight, eps):
    with contextlib.suppress(AttributeError, OSError):
        next(harms)()
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
"""


def test_the_verdict_on_a_row_that_takes_stdout_away_is_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(NORM)
    assert main([f"{tmp_path / 'mine.py'}:norm", "--dtype", "float32", "--forward"]) == RIGHT
    printed = capfd.readouterr()
    right = printed.out.count(": right\n")
    assert right > 3 and f" {right} of {right} cases right on this " in printed.out and not printed.err


def test_the_fault_of_a_row_whose_exception_has_no_message() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    assert places.Fault.raised(Mute()).text == "  it raises Mute: no message"


def never(case: object) -> str:
    return "runs nowhere"


# Rows of a table, the verdict on each, and a part of the reason.
ROWS = {
    entry("warns"): ("right", ""),
    entry("dies"): ("wrong", "killed by SIGABRT"),
    entry("reads_on"): ("wrong", "read as zeros"),
    Entry("refused", f"{FILE}:right", supports=f"{__name__}:never"): ("refused", "runs nowhere"),
    Entry("absent", "no_such_package:f", install="no-such-package"): ("refused", "pip install no-such-package brings"),
}


@pytest.mark.parametrize("as_json", [False, True])
def test_every_row_of_a_table_has_a_verdict(
    as_json: bool, worker: Worker, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verdict has a line of its own, also when the row warns. As JSON, no row is checked that is wrong."""
    rows = [row for row, (verdict, _) in ROWS.items() if not as_json or verdict == "refused"]
    kind = Kind(Table("attention", rows), KINDS["attention"].asks)
    monkeypatch.setattr(command, "KINDS", {"attention": kind, "norm": KINDS["norm"]})
    if as_json:
        monkeypatch.setattr(command.processes, "Worker", lambda _: nullcontext(worker))
    options = ["--all", "--dtype", "float32", "--head-dim", "16", "--forward"]
    status = main([*options, *(["--json"] if as_json else ["--kind", "attention"])])
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert "it is right" not in printed.err
    if as_json:
        verdicts = {record["name"]: (record["verdict"], record["reason"]) for record in map(json.loads, lines)}
        assert status == RIGHT and verdicts.pop("RMSNorm")[0] == "right"
    else:
        parts = [line.partition(": ") for line in lines if " of 5, " in line]
        verdicts = {place.split()[-1]: tuple(rest.split(", ", 1)) for place, _, rest in parts}
        assert status == WRONG and lines[-1] == "2 refused, 1 right, 2 wrong"
    assert verdicts.keys() == {row.name for row in rows}
    for row in rows:
        assert verdicts[row.name][0] == ROWS[row][0] and ROWS[row][1] in verdicts[row.name][1]


ENDINGS = {  # code of a file: (exit code, a part of what is printed)
    "raise KeyboardInterrupt": (1, "KeyboardInterrupt (in a worker process)"),
    "class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute": (2, "Mute: no message"),
    "raise ValueError(chr(0xD800))": (2, r"ValueError: \ud800 ("),
    "import os; os.abort()": (1, "killed by SIGABRT"),  # the last, since it ends the shared process
}


@pytest.mark.parametrize("code", ENDINGS)
def test_however_a_file_ends_it_is_told_in_a_line(
    code: str, worker: Worker, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies, or raises an exception: one that `except Exception` misses, whose `str` fails, or no UTF-8.

    The first of these has a process of its own, whose output is seen, too: it might print the exception as it ends.
    """
    if code != "raise KeyboardInterrupt":
        monkeypatch.setattr(command.processes, "in_own_process", worker.call)
    (tmp_path / "mine.py").write_text(code)
    status, line = ENDINGS[code]
    assert main([f"{tmp_path / 'mine.py'}:f"]) == status
    printed_text = "".join(capfd.readouterr())
    assert line in printed_text and "Traceback" not in printed_text
    assert printed_text.startswith("wrong\n") == (status == 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--head-dim", "0"), "--head-dim=0 must be at least 1"),
        (("--seed", "9" * 30), f"--seed={'9' * 30} must be at least "),
        (("--dtype", "float32,fp8"), "--dtype 'fp8': must be one of float32, bfloat16, float16"),
    ],
)
def test_a_wrong_option_is_named(option: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong one of these was said to be a fault of the implementation, or was not named."""
    assert main(["naive", *option]) == 2
    assert f"lmsys check: error: {message}" in capsys.readouterr().err


def test_one_target_is_named_or_all_are_checked() -> None:
    assert main(["--all", "right"]) == main([]) == main(["--all", "--kind", "rotary"]) == 2


def test_an_exception_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\ndef f(q, k, v, *, causal=False, scale=None):\n    return torch.ones(2) @ q[0, 0, 0]\n"
    )
    (question, *_) = attention.questions(Entry("f", f"{file}:f"), Options(32))
    fault = question.judge()
    assert fault is not None and fault.raises and "(mine.py, line 5: return torch.ones(2) @ q[0, 0, 0])" in fault.line
    file = tmp_path / "broken.py"
    file.write_text("x = 1\ny = absent\n")
    with pytest.raises(ValueError, match=r"name 'absent' is not defined \(broken.py, line 2: y = absent\)"):
        load_target(f"{file}:x")


def of_sequences(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention of tensors (B, S, H, D)."""
    return naive(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


@pytest.mark.parametrize(("layout", "verdict"), [("bhsd", WRONG), ("bshd", RIGHT)])
def test_where_no_case_is_right_the_other_layout_is_named(
    layout: str, verdict: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(16, grad=False, dtypes=("float32",), layout=layout, uses=False)
    assert check(Entry("mine", f"{__name__}:of_sequences"), options) == verdict
    assert ("say --layout bshd" in capsys.readouterr().out) == (verdict == WRONG)


def test_where_it_is_wrong() -> None:
    wrong = torch.zeros(2, 3, 8, 4, dtype=torch.bool)
    wrong[:, 1, 5:] = True
    assert places.where(wrong) == "head 1 of 3, rows 5 to 7 of 8, the last 3 (12.5 % of the elements)"
    wrong[:] = True
    assert places.where(wrong) == "every row and column (100 % of the elements)"
    wrong[:, :, 1::2] = False
    assert places.where(wrong) == "rows 0, 2, ... 6 of 8 (50 % of the elements)"
    outputs, expected = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    outputs[0, 0, 1, 0] = torch.nan
    assert places.worst(outputs, expected) == (0, 0, 1, 0)
