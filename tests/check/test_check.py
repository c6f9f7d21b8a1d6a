"""`lmsys check` on attention (lmsys/check): right functions pass, and for wrong ones the mistake is named.

The functions under test are in tests/support/wrong_kernels.py: `entry(name)` is the row of a function of that file, and
`WRONG` maps a name to the words that the report must contain, and the wrong function. To add a wrong one, add it there.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.attention import ATTENTION, Pattern
from lmsys.attention.naive import naive
from lmsys.check import __main__ as command
from lmsys.check import attention
from lmsys.check import question as places
from lmsys.check.__main__ import main
from lmsys.check.kinds import KINDS, RIGHT, WRONG, Kind, check
from lmsys.check.question import Options
from lmsys.registry import Entry, Table, load_target
from tests.support import wrong_kernels
from tests.support.variants import by_default_all_but, few_by_default

FILE = Path(wrong_kernels.__file__)


def entry(name: str) -> Entry:
    """The row of a function in tests/support/wrong_kernels.py."""
    return Entry(name, f"{FILE}:{name}")


RIGHT_FUNCTIONS = "right", "of_a_course", "right_by_tiles", "right_by_small_tiles"


@pytest.mark.parametrize("name", by_default_all_but(RIGHT_FUNCTIONS, *RIGHT_FUNCTIONS[2:]))
def test_what_is_right_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(entry(name), Options(32, grad=True)) == RIGHT
    printed_text = capsys.readouterr().out
    asked = [question for question in attention.questions(entry(name), Options(32)) if question.reason is None]
    assert printed_text.count(": right\n") == len(asked)
    assert ("it takes no scale" in printed_text) == (name == "of_a_course")
    assert "the same bits in 3 calls: yes; alone as in a batch of 2: " in printed_text


def test_a_function_without_a_mask_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked no causal case, not even among the extreme inputs, which come last."""
    assert check(entry("without_a_mask"), Options(16, grad=False, dtypes=("float32",))) == RIGHT
    printed_text = capsys.readouterr().out
    assert "not asked: it takes no causal" in printed_text and "causal, float32" not in printed_text
    assert "the same bits in 3 calls" in printed_text


def test_what_does_not_repeat_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(entry("any_order"), Options(32, grad=False)) == RIGHT
    assert "the same bits in 3 calls: no (o); " in capsys.readouterr().out
    assert check(entry("by_batch"), Options(32, grad=False)) == RIGHT
    assert "the same bits in 3 calls: yes; alone as in a batch of 2: no (o)\n" in capsys.readouterr().out


def test_the_example_of_the_pages_is_right() -> None:
    mine = Path(__file__).parents[2] / "docs" / "examples" / "mine.py"
    assert check(Entry("mine", f"{mine}:my_attention"), Options(32)) == RIGHT


@pytest.mark.parametrize("name", few_by_default(wrong_kernels.WRONG, one_in=3))
def test_a_mistake_is_named(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words, function = wrong_kernels.WRONG[name]
    monkeypatch.setattr(wrong_kernels, name, function, raising=False)
    assert check(Entry(name, f"tests.support.wrong_kernels:{name}"), Options(32)) == WRONG
    printed_text = capsys.readouterr().out
    assert words in printed_text, printed_text
    assert "no known mistake" not in printed_text


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


@pytest.mark.parametrize(
    "name", by_default_all_but(["naive", "vectorized", "flash_torch", "sdpa_math"], "naive", "vectorized")
)
def test_rows_of_the_table_are_right(name: str) -> None:
    assert check(ATTENTION[name], Options(32, seed=1)) == RIGHT


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"{FILE}:dies", "--head-dim", "32"]) == 1
    assert (printed_text := capfd.readouterr().out).startswith("wrong\n") and "killed by SIGABRT" in printed_text
    assert main([f"{FILE}:nothing"]) == 2
    assert "defines no 'nothing'" in capfd.readouterr().err


ENDINGS = {
    "raise KeyboardInterrupt": (1, "KeyboardInterrupt (in a worker process)"),
    "class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute": (2, "Mute: no message"),
    "raise ValueError(chr(0xD800))": (2, r"ValueError: \ud800 ("),
}


@pytest.mark.parametrize("code", ENDINGS)
def test_however_a_file_ends_it_is_told_in_a_line(code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception that no `except Exception` catches, one whose `str` raises, and one that cannot be encoded."""
    (tmp_path / "mine.py").write_text(code)
    status, line = ENDINGS[code]
    assert main([f"{tmp_path / 'mine.py'}:f"]) == status
    printed_text = "".join(capfd.readouterr())
    assert line in printed_text and "Traceback" not in printed_text


NORM = """import os, sys
{0}
def norm(x, weight, eps):
    {0}
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
"""


@pytest.mark.parametrize("harm", ["sys.stdout.close()", "sys.stdout = None", "os.close(1)"])
def test_the_verdict_on_a_row_that_takes_stdout_away_is_seen(
    harm: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """When its file is imported, and in each of its calls."""
    (tmp_path / "mine.py").write_text(NORM.format(harm))
    assert main([f"{tmp_path / 'mine.py'}:norm", "--dtype", "float32", "--forward"]) == RIGHT
    printed = capfd.readouterr()
    assert " cases right on this " in printed.out and printed.out.count(": right\n") > 3 and not printed.err


def test_the_fault_of_a_row_whose_exception_has_no_message() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    assert places.Fault.raised(Mute()).text == "  it raises Mute: no message"


def never(case: object) -> str:
    return "runs nowhere"


@pytest.mark.parametrize("as_json", [False, True])
def test_every_row_of_a_table_has_a_verdict(
    as_json: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verdict has a line of its own, also when the row warns. As JSON, fewer rows are checked, to save time."""
    rows = [
        *([] if as_json else [entry("warns"), entry("dies")]),
        entry("reads_on"),
        Entry("refused", f"{FILE}:right", supports=f"{__name__}:never"),
    ]
    rows.append(Entry("absent", "no_such_package:f", install="no-such-package"))
    kind = Kind(Table("attention", rows), KINDS["attention"].asks)
    monkeypatch.setattr(command, "KINDS", {"attention": kind, "norm": KINDS["norm"]})
    options = ["--all", "--dtype", "float32", "--head-dim", "32", *(["--json"] if as_json else [])]
    assert main(options) == WRONG
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert "it is right" not in printed.err
    if as_json:
        verdict_of = {record["name"]: (record["verdict"], record["reason"]) for record in map(json.loads, lines)}
    else:
        assert lines[-1] == "2 refused, 2 right, 2 wrong"
        parts = [line.partition(": ") for line in lines if " of 6, " in line]
        verdict_of = {place.split()[-1]: tuple(rest.split(", ", 1)) for place, _, rest in parts}
    verdicts = {"reads_on": "wrong", "refused": "refused", "absent": "refused", "RMSNorm": "right"}
    assert {name: verdict for name, (verdict, _) in verdict_of.items()} == verdicts | (
        {} if as_json else {"warns": "right", "dies": "wrong"}
    )
    assert as_json or "killed by SIGABRT" in verdict_of["dies"][1]
    assert "read as zeros" in verdict_of["reads_on"][1]
    assert (
        verdict_of["refused"][1] == "runs nowhere"
        and "pip install no-such-package brings it" in verdict_of["absent"][1]
    )
    assert main([*options, "--kind", "norm"]) == RIGHT
    assert main(["--all", "right"]) == main([]) == 2


def test_an_exception_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\n\ndef f(q, k, v, *, causal=False, scale=None):\n    return torch.ones(2) @ q[0, 0, 0]\n"
    )
    (question, *_) = attention.questions(Entry("f", f"{file}:f"), Options(32))
    fault = question.judge()
    assert fault is not None and fault.raises and f"({file}, line 5: return torch.ones(2) @ q[0, 0, 0])" in fault.line
    file = tmp_path / "broken.py"
    file.write_text("x = 1\ny = absent\n")
    with pytest.raises(ValueError, match=rf"name 'absent' is not defined \({file}, line 2: y = absent\)"):
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
