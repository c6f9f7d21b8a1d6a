"""`lmsys.registry`: tables of rows, which are found by name or by path, or come from other packages' entry points.

A row (`Entry`) is a name and the target that it loads. `table` has three rows: one that always runs ("plain"), one that
runs even cases alone ("choosy"), and one whose package is missing ("absent"). The last part is about traits, which are
facts that a table's row or a user's class states. `Facts` declares the traits of a table made here.
"""

import importlib.metadata
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmsys.registry import Entry, Table, Traits, load_target

TABLE_ROWS = [
    Entry("plain", "math:sqrt"),
    Entry("choosy", "math:exp", supports="test_registry:only_even"),
    Entry("absent", "no_such_package.kernel:run", extra="peers"),
]


def only_even(case: int) -> str | None:
    """The function `supports` of "choosy": None, or the reason why it cannot run a case."""
    return None if case % 2 == 0 else f"{case} is odd"


@pytest.fixture
def table() -> Table:
    return Table("number", TABLE_ROWS, auto=lambda case: ("absent", "choosy", "plain")[:: -1 if case > 9 else 1])


def test_a_module_that_another_thread_is_importing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "events_of_the_test", (began, go), raising=False)
    lines = "began, go = threading.events_of_the_test", "began.set()", "go.wait()", "row = 3"
    (tmp_path / "slow_to_import.py").write_text("\n".join(["import threading", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load_target, "slow_to_import:row")
        began.wait()
        second = threads.submit(load_target, "slow_to_import:row")
        wait([second], timeout=0.1)  # time for a failure, which would come at once
        go.set()
    assert first.result() == second.result() == 3


def test_files_of_one_package_share_its_modules(tmp_path: Path) -> None:
    """Also files that are loaded later than the first. A package of the same name elsewhere does not serve for them."""
    for project, number in (("one", 1), ("two", 2)):
        folder = tmp_path / project / "package_of_a_user"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "common.py").write_text(f"NUMBER = {number}\n")
        for name in ("first", "second"):
            (folder / f"{name}.py").write_text("from .common import NUMBER\n")
    try:
        loaded = [load_target(f"{tmp_path}/one/package_of_a_user/{name}.py:NUMBER") for name in ("first", "second")]
        assert loaded == [1, 1]
        with pytest.raises(ValueError, match="relative import"):
            load_target(f"{tmp_path}/two/package_of_a_user/first.py:NUMBER")
    finally:
        for name in [name for name in sys.modules if name.startswith("package_of_a_user")]:
            del sys.modules[name]


def test_rows_come_by_name_in_table_order(table: Table) -> None:
    assert list(table) == ["plain", "choosy", "absent"] and len(table) == 3 and "plain" in table
    assert "plane" not in table
    assert table["plain"].load()(4.0) == 2.0


def test_an_unknown_name_offers_the_nearest(table: Table) -> None:
    with pytest.raises(ValueError, match="unknown number 'chosy'; did you mean choosy?"):
        table["chosy"]
    with pytest.raises(ValueError, match="unknown number 'xyz'; did you mean absent, choosy, plain?"):
        table["xyz"]


def test_a_missing_package_is_a_reason_and_names_the_extra(table: Table) -> None:
    reason = table["absent"].why_not(1)
    assert reason is not None and "no_such_package" in reason and "[peers]' brings it" in reason
    with pytest.raises(ImportError, match="no_such_package"):
        table["absent"].load()


def test_auto_takes_the_first_row_that_can_run_the_case_in_an_order_of_the_case(table: Table) -> None:
    assert [table.pick("auto", case).name for case in (2, 3, 10)] == ["choosy", "plain", "plain"]


def test_a_named_row_never_falls_back(table: Table) -> None:
    with pytest.raises(ValueError, match="number 'choosy' cannot run 3: 3 is odd"):
        table.pick("choosy", 3)


def test_auto_gives_every_reason_when_no_row_can_run_the_case() -> None:
    table = Table("number", TABLE_ROWS, auto=lambda case: ("absent", "choosy"))
    with pytest.raises(ValueError, match=r"absent: .*no_such_package.*; choosy: 3 is odd"):
        table.pick("auto", 3)


def test_entry_points_join_the_table_and_cannot_redefine_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [SimpleNamespace(name="theirs", value="math:cos")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "g" else [])
    assert Table("number", TABLE_ROWS, group="g")["theirs"].load()(0.0) == 1.0
    points.append(SimpleNamespace(name="plain", value="math:cos"))
    with pytest.raises(ValueError, match=r"entry points in 'g' redefine the rows \['plain'\]"):
        list(Table("number", TABLE_ROWS, group="g"))


def test_select_takes_exactly_the_rows_named_and_paths(table: Table, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def kernel(x):\n    return x + 1\n")
    rows = table.select(["choosy", f"{file}:kernel", "choosy"])
    assert [row.name for row in rows] == ["choosy", "kernel"]
    assert rows[1].load()(1) == 2 and rows[1].why_not(None) is None


def test_files_of_one_name_are_two_modules_but_two_rows_of_one_name_are_refused(table: Table, tmp_path: Path) -> None:
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def kernel():\n    return {value}\n")
    targets = [f"{tmp_path}/{folder}/mine.py:kernel" for folder in ("one", "two")]
    assert [load_target(target)() for target in targets] == [1, 2]
    with pytest.raises(ValueError, match="two rows are called 'kernel': .*one/mine.py:kernel and .*two/mine.py:kernel"):
        table.select(targets)


def test_the_apply_of_an_autograd_function_stands_for_the_function(tmp_path: Path) -> None:
    """Triton's tutorial exports `attention = Attention.apply`, which is loaded as `Attention`."""
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Attention(torch.autograd.Function):\n    pass\nattention = Attention.apply\n"
        "def apply(q, k, v):\n    return q\n"
        "class Kernel:\n    def apply(self, q):\n        return q\n"
        "method = Kernel().apply\n"
    )
    assert load_target(f"{tmp_path}/mine.py:attention") is load_target(f"{tmp_path}/mine.py:Attention")
    assert load_target(f"{tmp_path}/mine.py:apply")(1, 2, 3) == 1
    assert load_target(f"{tmp_path}/mine.py:method")(1) == 1  # a method `apply` of another object is loaded as it is


@pytest.mark.parametrize("target", ["no_colon", ":attribute", "module:"])
def test_a_malformed_target_is_named(target: str) -> None:
    with pytest.raises(ValueError, match=f"target='{target}' must read module:attribute"):
        load_target(target)


@pytest.mark.parametrize(
    ("target", "text", "error"),
    [
        ("absent.py:kernel", None, "absent.py' is not a file"),
        ("broken.py:kernel", "import no_such_package\n", "broken.py' does not load: ModuleNotFoundError"),
        ("syntax.py:kernel", "def kernel(:\n", "syntax.py' does not load: SyntaxError"),
        ("other.py:kernel", "def other():\n    pass\n", "other.py defines no 'kernel'"),
        ("other.py", "def other():\n    pass\n", "other.py' must read module:attribute or path.py:attribute"),
        ("exits.py:kernel", "import sys\nsys.exit(3)\n", "exits.py' does not load: SystemExit: 3"),
        ("mine.py:CONSTANT", "CONSTANT = 7\n", "must name a function or a class; it is 7"),
        ("mine.py:plain", "def plain(x):\n    return x\n", "the table has a row 'plain' of its own"),
    ],
)
def test_a_path_that_does_not_load_a_new_callable_is_named(
    table: Table, tmp_path: Path, target: str, text: str | None, error: str
) -> None:
    if text is not None:
        (tmp_path / target.partition(":")[0]).write_text(text)
    with pytest.raises(ValueError, match=error):
        table.select([f"{tmp_path}/{target}"])


@dataclass(frozen=True)
class Facts(Traits):
    """The traits that rows of these tests may state, beside those of `Traits`."""

    stage: int | None = None
    sums: bool = True


def row_of(folder: Path, text: str, table: Table) -> Entry:
    """The row of `Kernel` in a file with this text, selected by its path, as a user does."""
    file = folder / "mine.py"
    file.write_text(text)
    (row,) = table.select([f"{file}:Kernel"])
    return row


def test_traits_come_from_the_table_or_else_the_class_or_else_defaults(tmp_path: Path) -> None:
    row = row_of(tmp_path, "class Kernel:\n    stage = 2\n", Table("row", [], traits=Facts))
    assert Facts.of(row) == Facts(stage=2)
    assert Facts.of(replace(row, traits={"stage": 3, "color": "#123456"})) == Facts(stage=3, color="#123456")
    assert Facts.of(replace(row, traits=Facts(sums=False))) == Facts(
        sums=False
    )  # has all traits, so the class is not read
    assert Facts.of(Entry("absent", "no_such_package:x", traits={"stage": 5})) == Facts(stage=5)
    assert Facts.of(Entry("narrow", "no_such_package:x", traits=Traits(baseline=1))) == Facts(baseline=1)


@pytest.mark.parametrize("traits", [{"color": "#123456"}, Traits(color="#123456")])
def test_a_report_reads_the_traits_that_the_table_states(traits: Traits | dict[str, str]) -> None:
    assert Entry("a", "m:a", "A", traits=traits).to_json() == {
        "name": "a",
        "label": "A",
        "peer": False,
        "color": "#123456",
    }


KNOWN = "color, baseline, rivals, compiles, kernels, stage, sums"


@pytest.mark.parametrize(
    ("traits", "kind", "error"),
    [
        ({"summs": False}, Facts, f"trait 'summs' must be one of {KNOWN}; did you mean sums?"),
        (Facts(stage=1), Traits, "trait 'stage' must be one of color, "),
        ({"stage": "two"}, Facts, "trait 'stage' must be of type int | None; got 'two'"),
        ({"color": "red"}, Traits, "trait 'color' must be a color such as #2563eb; got 'red'"),
        ({"rivals": ("x" * 1001,)}, Traits, "trait 'rivals' has more than 1,000 characters"),
    ],
)
def test_a_trait_that_does_not_exist_is_an_error_at_the_row(traits: Any, kind: type[Traits], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"row 'a': {error}")):
        Table("row", [Entry("a", "m:a", traits=traits)], traits=kind)


def test_two_rows_of_one_name_are_an_error_at_the_table() -> None:
    with pytest.raises(ValueError, match="two rows of the table 'number' are called 'root'"):
        Table("number", [Entry("root", "math:sqrt"), Entry("root", "math:cbrt")])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "def Kernel(): ...\n\nKernel.summs = False\nKernel.rivals = ()\n",
            "'summs' must be one of .*; did you mean sums",
        ),
        ("class Kernel:\n    sums = 'no'\n", "'sums' must be of type bool; got 'no'"),
    ],
)
def test_a_wrong_trait_of_a_users_row_is_an_error(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"row 'Kernel': trait {error}"):
        row_of(tmp_path, text, Table("row", [], traits=Facts))


def test_attributes_that_are_no_traits_are_ignored(tmp_path: Path) -> None:
    text = "class Kernel:\n    block_size = 64\n    sum = 'a text'\n    def stages(self): ...\n"
    assert Facts.of(row_of(tmp_path, text, Table("row", [], traits=Facts))) == Facts()


def test_a_misspelt_trait_of_another_packages_row_is_an_error_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text("def kernel(): ...\n\nkernel.summs = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [SimpleNamespace(name="theirs", value="theirs:kernel")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "g" else [])
    with pytest.raises(ValueError, match="row 'theirs': trait 'summs' must be one of .*; did you mean sums"):
        Facts.of(Table("number", [], group="g", traits=Facts)["theirs"])
