"""`python -m dev.earlier.kernels` and `dev.earlier.steps` compare today's package with a commit's, as HEAD's."""

import re
from pathlib import Path
from typing import Any

import pytest

from dev import earlier
from lmsys.files import git
from tests.support.processes import ROOT

in_a_repository = pytest.mark.skipif(
    not git(ROOT, "rev-parse", "HEAD"), reason="this copy of the files has no git repository: clone it"
)


@in_a_repository
def test_the_earlier_package_has_only_its_new_name(tmp_path: Path) -> None:
    commit = earlier.unpack("HEAD", tmp_path)
    assert commit == git(ROOT, "rev-parse", "HEAD") and [x.name for x in tmp_path.iterdir()] == [earlier.NAME]
    sources = {path: path.read_text() for path in (tmp_path / earlier.NAME).rglob("*.py")}
    assert len(sources) > 100 and not any(re.search(r"\blmsys\b", text) for text in sources.values())


@in_a_repository
@pytest.mark.parametrize("command", ["kernels", "steps"])
@pytest.mark.parametrize("ref", ["no-such-commit", "HEAD^{tree}"])
def test_a_reference_that_is_no_commit_is_refused(command: str, ref: str, capsys: pytest.CaptureFixture[str]) -> None:
    main: Any = __import__(f"dev.earlier.{command}", fromlist=["main"]).main
    with pytest.raises(SystemExit, match="2"):
        main([ref])
    assert f"{ref!r} is no commit of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value", "message"),
    [
        ("kernels", "--head-dim", "6x", "--head-dim '6x': must be a positive whole number"),
        ("kernels", "--card", "sm_75", "invalid choice: 'sm_75'"),
        ("steps", "--compile", "grafed", "--compile 'grafed': "),
        ("steps", "--size", "huge", "--size 'huge': "),
        ("steps", "--batch", "0", "--batch '0': must be a positive whole number"),
        ("steps", "--strategy", "nobody", "nobody"),
        ("steps", "--strategy", "torch_ddp", "it is not of this package"),
        ("steps", "--rounds", "4", "an interval needs 5 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    command: str, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main: Any = __import__(f"dev.earlier.{command}", fromlist=["main"]).main
    with pytest.raises(SystemExit, match="2"):
        main(["HEAD", option, value])
    assert message in capsys.readouterr().err


@in_a_repository
def test_kernels_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = pytest.importorskip("dev.earlier.kernels", reason="pip install triton==3.6.0 to compile the kernels")
    made = {"lmsys": {"fwd": ("a",), "dq": ("b",)}, earlier.NAME: {"fwd": ("a",), "dq": ("c",)}}
    monkeypatch.setattr(kernels, "_in_new_process", lambda package, *_: made[package])
    assert kernels.main(["HEAD", "--head-dim", "64"]) == 1
    head = (git(ROOT, "rev-parse", "HEAD") or "")[:10]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"head dimension 64, causal: 2 kernels, 1 differ from {head}", "  dq"] and len(lines) == 4
    made[earlier.NAME] = made["lmsys"]
    assert kernels.main(["HEAD", "--head-dim", "64"]) == 0


@in_a_repository
@pytest.mark.on_request
def test_todays_kernels_are_those_of_the_last_commit_where_nothing_changed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = pytest.importorskip("dev.earlier.kernels", reason="pip install triton==3.6.0 to compile the kernels")
    if git(ROOT, "status", "--porcelain", "lmsys"):
        pytest.skip("files of lmsys have changed since the last commit: commit them")
    assert kernels.main(["HEAD", "--head-dim", "64"]) == 0
    assert re.findall(r"(\d+) kernels, (\d+) differ", capsys.readouterr().out) == [("10", "0")] * 2


@in_a_repository
@pytest.mark.long
def test_steps_have_a_ratio_and_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    from dev.earlier import steps

    words = "--strategy", "zero1", "--context", "16", "--batch", "1", "--rounds", "5", "--profile"
    assert steps.main(["HEAD", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("| tiny | eager | zero1 |"))
    number = r"\d+\.\d{3}"
    assert re.search(
        rf"\| {number} \| {number} \| {number} \| {number} to {number} \| (same|unclear|slower|faster) \|", row
    )
    functions = [line for line in lines if re.fullmatch(r"\| .* \| \d+\.\d \| \d+\.\d \| \d+ \| \d+ \|", line)]
    assert len(functions) == steps.FUNCTIONS
