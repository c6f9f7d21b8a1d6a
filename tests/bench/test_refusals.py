"""A run that is refused (a usage error) changes no file: neither its result, nor one that it resumes, nor a journal.

A journal is a file beside a result, with the records of a run that has not ended. The bad options are those in BAD of
test_plugin.py.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsys.bench import record
from lmsys.bench.options import check_free, check_group_by, memory_limit, output
from tests.bench.test_plugin import BAD, EXAMPLE, QUICK, ROOT, SMALL, run
from tests.bench.test_results import RECORD, head, result_of
from tests.support.collected import collect
from tests.support.files import tree

ATTENTION = RECORD | {"label": "i"}


def existing(folder: Path, records: list[dict[str, Any]], **changes: object) -> Path:
    """Makes a folder with a result, and the journal of a killed run that resumed it. Returns the result's path."""
    folder.mkdir()
    output = folder / "out.json"
    output.write_text(result_of(records, **changes))
    record.Journal(output, head(**changes), records).add(records[0] | {"id": "b"})
    return output


@pytest.mark.long
def test_a_refused_run_changes_no_file(tmp_path: Path) -> None:
    """Each bad option is given with --benchmark-json, and with --resume, of an existing result."""
    cases = []
    for number, options in enumerate(
        refused for refused in BAD if not refused.startswith(("--benchmark-json", "--resume"))
    ):
        for option in ("--benchmark-json", "--resume"):
            output = existing(tmp_path / f"{number}{option}", [ATTENTION])
            cases.append((output, ["benchmarks/bench_attention.py", *options.split(" "), option, output]))
    misfits: list[tuple[str, list[dict[str, Any]], dict[str, object]]] = [
        ("family", [ATTENTION | {"benchmark": "model"}], {}),
        ("commit", [ATTENTION], {"commit": "another"}),
        ("machine", [ATTENTION], {"name": "another"}),
    ]
    for name, records, changes in misfits:
        output = existing(tmp_path / name, records, **changes)
        cases.append((output, ["benchmarks/bench_attention.py", "--resume", output]))
        elsewhere = ["--benchmark-json", output.with_name("elsewhere.json")]
        cases.append((output, ["benchmarks/bench_attention.py", "--resume", output, *elsewhere]))
    before = {output: tree(output.parent) for output, _ in cases}
    answers = collect([command for _, command in cases])
    for (output, command), answer in zip(cases, answers, strict=True):
        assert answer["code"] == pytest.ExitCode.USAGE_ERROR and "wrote" not in answer["said"], (command, answer)
        assert tree(output.parent) == before[output], command


RESULTS = st.one_of(
    st.binary(min_size=1, max_size=200),
    st.text(min_size=1).map(lambda command: result_of([ATTENTION], command=command).encode()),
)


@given(content=RESULTS, has_journal=st.booleans(), command=st.text(max_size=3))
def test_the_result_of_another_command_is_refused_and_left_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, has_journal: bool, command: str
) -> None:
    output = tmp_path_factory.mktemp("free") / "out.json"
    output.write_bytes(content)
    if has_journal:
        record.Journal(output, head(), [ATTENTION])
    before = tree(output.parent)
    try:
        is_same_command = json.loads(content)["lmsys"]["machine"]["command"] == command
    except (ValueError, TypeError, KeyError):
        is_same_command = False
    if is_same_command and not has_journal:
        check_free(output, command)
    else:
        with pytest.raises(ValueError, match=re.escape(str(output))):
            check_free(output, command)
    assert tree(output.parent) == before


def test_new_files_empty_ones_and_those_of_the_same_command_may_be_written(tmp_path: Path) -> None:
    check_free(tmp_path / "new.json", "any")
    (tmp_path / "empty.json").touch()
    check_free(tmp_path / "empty.json", "any")
    (tmp_path / "out.json").write_text(result_of([ATTENTION], command="another"))
    check_free(tmp_path / "out.json", "another")


@pytest.mark.long
def test_cases_are_grouped_by_their_fields(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    tables = "--benchmark-group-by=param:size,param:impl", "--benchmark-columns=min"
    ended = run(tmp_path, *SMALL, *QUICK, *tables, "--benchmark-json", "out.json")
    assert ended.returncode == 0 and "KeyError" not in ended.stdout, ended.stdout
    assert all(f"benchmark 'size={size} impl=mine': 1 tests" in ended.stdout for size in (16, 17)), ended.stdout
    assert len(record.load(tmp_path / "out.json")["records"]) == 4


def test_groups_by_unknown_fields_are_refused() -> None:
    for text in ("group", "name", "func", "fullname", "fullfunc", "param", "param:size,group"):
        check_group_by(text, ["size"])
    with pytest.raises(ValueError, match="--benchmark-group-by size: must be one of"):
        check_group_by("size", ["size"])


@pytest.mark.on_request
def test_a_run_against_an_earlier_state_that_selects_nothing_measures_no_machine(tmp_path: Path) -> None:
    """The run has a row from a file. test_plugin.py has such a run without the earlier state."""
    (tmp_path / "mine.py").write_text("from lmsys.attention.naive import naive as row\n")
    arguments = "benchmarks/bench_attention.py", "--attention", f"sdpa_math,{tmp_path}/mine.py:row", "--sweep", "smoke"
    options = "-k", "nothing", "--against", "HEAD", "--benchmark-json", tmp_path / "out.json"
    ended = run(ROOT, *arguments, *options, plugin=False)
    assert ended.returncode == 5 and "-k 'nothing' selects no case" in ended.stdout, ended.stdout + ended.stderr
    assert "measuring what this machine reaches" not in ended.stdout and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("0.5GiB", 2**29), ("512 MiB", 2**29), ("16GB", 16 * 10**9), ("100B", 100)],
)
def test_sizes_of_memory_are_read(text: str, size: int) -> None:
    assert memory_limit(text, "cuda") == size


@pytest.mark.parametrize(
    "text", ["24", "GiB", "-1GiB", "0GiB", "24gib", "24GBit", "", pytest.param("9" * 400 + "GiB", id="of 400 digits")]
)
def test_other_texts_than_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        memory_limit(text, "cuda")


def test_the_path_of_the_result_is_found_in_any_option(tmp_path: Path) -> None:
    """--benchmark-json is an open file in version 5.2 of pytest-benchmark, and later a path.

    Without it, --lmsys-resume names the file.
    """
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        for benchmark_json, resume in ((file, None), (path, None), (None, path)):
            options = {"benchmark_json": benchmark_json, "lmsys_resume": resume}
            assert output(cast(pytest.Config, SimpleNamespace(getoption=options.get))) == path
