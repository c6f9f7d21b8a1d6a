"""`lmsys.bench.checkout`: a temporary folder to import from, with rows of an earlier state and the bench of today.

A row is an implementation that is measured. The earlier state is a git reference or another folder. ROWS lists the
files that are taken from it, and JUDGES the files among them that are taken from today all the same.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmsys import files
from lmsys.bench import checkout, options
from lmsys.bench.checkout import JUDGES, PACKAGE, ROWS, Checkout


def git(folder: Path, *words: str) -> str:
    named = "-c", "user.name=a", "-c", "user.email=a@b"
    return subprocess.run(["git", "-C", folder, *named, *words], check=True, capture_output=True, text=True).stdout


def write(folder: Path, *files: str, text: str) -> None:
    """Writes the text into each of these files below the folder."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose committed files contain "earlier", and whose files of today contain "today".

    The working folder is work/, below it.
    """
    folder = tmp_path / "repository"
    rows = "lmsys/attention/naive.py", "lmsys/attention/flash.py"
    both = *rows, "lmsys/bench/runner.py", "lmsys/testing.py", "lmsys/autograd.py", "work/mine.py", "work/bench_mine.py"
    write(folder, *both, "lmsys/parallel", text="earlier")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    (folder / "lmsys" / "parallel").unlink()  # a file in the earlier state, a folder today
    write(folder, *both, "lmsys/turns.py", *(f"lmsys/{name}" for name in JUDGES), text="today")
    monkeypatch.chdir(folder / "work")
    monkeypatch.setattr(checkout, "PACKAGE", folder / "lmsys")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return folder


def config(add_cleanup: Callable[[Callable[[], None]], object], **options: Any) -> Any:
    """A stand-in for pytest's config with these options, {name without "lmsys_": value}; others have their defaults."""
    values = {"against": "HEAD", "margin": None, "no_isolation": False, "nvtx": False, "repeat": 1} | options
    named = {f"lmsys_{name}": value for name, value in values.items()}
    return SimpleNamespace(getoption=named.get, add_cleanup=add_cleanup)


@pytest.mark.parametrize("is_folder", [False, True])
def test_rows_are_of_the_earlier_state_and_the_bench_is_of_today(is_folder: bool, repository: Path) -> None:
    elsewhere = str(repository.parent / "a copy")  # with the committed state
    git(repository, "worktree", "add", "-q", elsewhere, "HEAD")
    text = elsewhere if is_folder else "HEAD"
    state = Checkout(text, repository.parent / "temporary")
    texts = {
        path.relative_to(state.tree).as_posix(): path.read_text()
        for path in sorted(state.tree.glob("[lw]*/**/*.py"), key=str)  # of lmsys and work
    }
    for folder in ("lmsys/attention", "lmsys/bench"):  # they are links, which glob does not follow
        texts |= {f"{folder}/{path.name}": path.read_text() for path in (state.tree / folder).iterdir()}
    assert {name for name, text in texts.items() if name.startswith("lmsys") and text == "earlier"} == {
        "lmsys/attention/flash.py", "lmsys/autograd.py"
    }  # fmt: skip
    assert texts["lmsys/bench/runner.py"] == texts["lmsys/testing.py"] == texts["lmsys/attention/naive.py"] == "today"
    assert (
        texts["lmsys/parallel/group.py"] == texts["lmsys/attention/contract.py"] == texts["lmsys/turns.py"] == "today"
    )
    assert (state.working_folder / "mine.py").read_text() == "earlier"
    state.use_today(repository / "work" / "bench_mine.py")
    assert (state.working_folder / "bench_mine.py").read_text() == "today"
    assert (state.working_folder / "mine.py").read_text() == "earlier"
    assert state.commit == ("" if is_folder else git(repository, "rev-parse", "HEAD").strip())
    assert state.name == ("a-copy" if is_folder else state.commit[:10])
    if is_folder:
        assert git(Path(text), "status", "--short") == ""


def test_installed_packages_are_imported_from_where_they_are(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Checkout("HEAD", repository.parent / "temporary")
    monkeypatch.setattr(sys, "prefix", str(repository / ".venv"))
    packages = str(repository / ".venv" / "lib")
    assert state.path(["", str(repository), packages, "/usr/lib"]) == [
        str(state.working_folder), str(state.tree), packages, "/usr/lib"
    ]  # fmt: skip
    assert state.target("mine.py:f") == "mine.py:f" and state.target("math:sin") == "math:sin"
    assert state.target(f"{repository}/work/mine.py:f") == f"{state.working_folder}/mine.py:f"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v9", "'v9': neither a folder nor a git reference of"),
        ("^HEAD", r"'\^HEAD': neither a folder nor a git reference of"),
        ("HEAD", "'HEAD' is a folder and a git reference: name one by ./HEAD or its commit"),
        ("./HEAD", "it has no folder work"),
    ],
)
def test_a_text_that_names_no_state_is_refused(text: str, told: str, repository: Path) -> None:
    folder = repository.parent / "temporary"
    (repository / "work" / "HEAD").mkdir()
    with pytest.raises(ValueError, match=told):
        Checkout(text, folder)
    assert text == "./HEAD" or not list(folder.iterdir())


@pytest.mark.parametrize("text", ["HEAD", "v9", "."])
def test_a_run_removes_the_temporary_folder(text: str, repository: Path) -> None:
    cleanups: list[Callable[[], None]] = []
    with nullcontext() if text == "HEAD" else pytest.raises(ValueError, match="--against"):
        state = options.checkout(config(cleanups.append, against=text), on_ranks=False)
        assert state is not None and state.working_folder.is_dir()
    for cleanup in cleanups:
        cleanup()
    assert cleanups and not list((repository.parent / "temporary").iterdir())


def test_the_listed_files_exist() -> None:
    assert all((PACKAGE / name).exists() for name in (*ROWS, *JUDGES))


def test_the_registry_has_what_earlier_rows_need(repository: Path) -> None:
    """The checkout's registry is today's, with lmsys/bench/earlier.py appended."""
    write(repository, "lmsys/registry.py", text="today\n")
    write(repository, "lmsys/bench/earlier.py", text="and more\n")
    state = Checkout("HEAD", repository.parent / "temporary")
    assert (state.tree / "lmsys" / "registry.py").read_text() == "today\nand more\n"
    assert (repository / "lmsys" / "registry.py").read_text() == "today\n"


def test_earlier_rows_read_any_trait_by_its_name() -> None:
    code = """if True:
        from lmsys import registry
        from lmsys.traits import AttentionTraits, StrategyTraits

        exec(open(registry.__file__.replace("registry.py", "bench/earlier.py")).read())
        row = registry.Entry("a", "math:sqrt", traits={"keeps_scores": True, "of_old": 3})
        assert registry.Table("attention", [row])["a"].trait("keeps_scores") is row.trait("none", True) is True
        assert row.trait("of_old") == 3 and row.trait("none") is None
        assert AttentionTraits.of(row).keeps_scores and StrategyTraits.of(row) == StrategyTraits()
        assert AttentionTraits.stated("a", row.traits) == AttentionTraits(keeps_scores=True)  # an earlier table's call
    """
    subprocess.run([sys.executable, "-c", code], check=True)


# A program that trains a step with an earlier lmsys and today's benchmarks.
STEP = """
import torch
from benchmarks.data_parallel import check, rank
from benchmarks.loss import unchunked
from benchmarks.model import rig
from benchmarks.training import rank as training_rank
from lmsys.config import model_config
from lmsys.model import TransformerLM
from lmsys.parallel import STRATEGIES
from lmsys.training import loop
from lmsys.training.prepare import Execution, prepare

model = TransformerLM(model_config("tiny", vocab_size=64, context_length=8))
before = model.lm_head.weight.clone()
strategy, optimizer, autocast = prepare(model, Execution(STRATEGIES["bucketed"], precision="bf16"), lr=1e-2)
with autocast():
    loss = strategy(torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64))
loss.backward()
strategy.finish()
optimizer.step()
assert not before.equal(model.lm_head.weight)
loss = unchunked(torch.zeros(2, 4), torch.ones(8, 4), torch.tensor([0, 7]))
assert loss.item() == torch.tensor(8.0).log().item()
print(loop.__file__)
"""


@pytest.mark.long
def test_todays_benchmarks_train_a_model_from_before_lmsys_training_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = PACKAGE.parent
    monkeypatch.chdir(root)
    added = files.git(root, "log", "--diff-filter=A", "--format=%H", "--", "lmsys/training/prepare.py")
    if not added or not files.git(root, "rev-parse", "--verify", "--quiet", f"{added}^"):
        pytest.skip(
            "the history from before lmsys/training/prepare.py is not here: fetch it with git fetch --unshallow"
        )
    state = Checkout(f"{added}^", tmp_path)
    state.use_today(root / "benchmarks")
    ended = subprocess.run(
        [sys.executable, "-c", STEP],
        cwd=state.tree,
        env=os.environ | {"PYTHONPATH": str(state.tree)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert not Path(ended.stdout.strip()).resolve().is_relative_to(root), "the rows are today's"
