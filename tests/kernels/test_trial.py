"""`trial.refusal` tries a row once on an untested version of Triton, in a process of its own, and keeps the verdict.

The trials are stand-ins from `tests/support/trials.py`, which count how often they run.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0")

import torch  # noqa: E402
import triton  # noqa: E402

from lmsys.kernels import trial  # noqa: E402
from tests.support.trials import COUNT, crash, full, hang, right, uncompiled, wrong

CAPABILITY = (9, 0)
FILES = (Path(__file__),)


@pytest.fixture(autouse=True)
def nothing_tried_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(COUNT, str(tmp_path / "count"))
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empties the memory of verdicts, as in a later process; those on disk stay."""
    monkeypatch.setattr(trial, "_verdicts", {})


def refusal(function: Callable[[tuple[int, int]], None], capability: tuple[int, int] = CAPABILITY) -> str | None:
    """The reason why a row is refused whose trial is `function`, or None."""
    return trial.refusal("a_row", function, FILES, capability)


def trials() -> list[str]:
    """The process ids of the trials that have run."""
    file = Path(os.environ[COUNT])
    return file.read_text().split() if file.exists() else []


def test_a_row_whose_trial_is_exact_is_taken_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(right) is None and refusal(right) is None
    forget(monkeypatch)
    assert refusal(right) is None
    assert len(trials()) == 1 and trials() != [str(os.getpid())]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (wrong, "ValueError: dq is wrong"),
        (crash, "a worker process died: killed by SIGSEGV"),
        (hang, "a worker process did not answer within 3 s and was killed"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(
    function: Callable[[tuple[int, int]], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "DEADLINE_S", 3.0 if function is hang else 60.0)
    reason = str(refusal(function))
    assert f"was tried on triton 3.99.0, on which its GPU tests have not run: {what};" in reason
    assert "it runs on triton 3.6.0" in reason and f"to try again, delete {trial.KEPT.path}" in reason
    forget(monkeypatch)
    assert refusal(function) == reason and len(trials()) == 1
    trial.KEPT.path.unlink()
    forget(monkeypatch)
    assert refusal(right) is None


def test_a_refusal_has_the_last_line_of_the_compilers_message() -> None:
    assert "RuntimeError: at 3:11: ... AttributeError: no reinterpret;" in str(refusal(uncompiled))


def test_a_verdict_is_for_its_versions_gpu_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every file of a folder counts. After each change there is a new trial; verdicts on earlier states are kept."""
    source = tmp_path / "kernels" / "one.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")

    def tried(capability: tuple[int, int] = CAPABILITY) -> int:
        before = len(trials())
        for _ in range(2):
            trial.refusal("a_row", wrong, (source.parent,), capability)
        return len(trials()) - before

    assert tried() == tried((10, 0)) == 1
    changes: list[Callable[[], object]] = [
        partial(monkeypatch.setattr, triton, "__version__", "3.99.1"),
        partial(monkeypatch.setattr, torch, "__version__", "9.9.9"),
        partial(source.write_text, "x = 2\n"),
    ]
    for change in changes:
        change()
        assert tried() == 1
    source.with_name("two.py").touch()
    source.write_text("x = 1\n")
    forget(monkeypatch)
    assert tried() == 0, "an empty file changes nothing"
    assert len(json.loads(trial.KEPT.path.read_text())) == 5


def test_out_of_memory_is_reported_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "out of memory" in str(refusal(full)) and "out of memory" in str(refusal(full))
    assert len(trials()) == 1 and not trial.KEPT.path.exists()
    forget(monkeypatch)
    assert refusal(right) is None


@pytest.mark.parametrize(
    "text",
    ["{not json", "[1, 2]", '{"key": 7}', '{"a": "", "a": ""}', pytest.param("[" * 10**5, id="nested too deep")],
)
def test_corrupt_verdicts_are_named(text: str) -> None:
    trial.KEPT.path.parent.mkdir(parents=True)
    trial.KEPT.path.write_text(text)
    with pytest.raises(ValueError, match="verdicts are corrupt") as error:
        refusal(right)
    assert str(trial.KEPT.path) in str(error.value)


def test_a_verdict_that_cannot_be_written_lasts_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.warns(UserWarning, match="for this process only"):
        assert "dq is wrong" in str(refusal(wrong))
    assert "dq is wrong" in str(refusal(wrong)) and len(trials()) == 1
