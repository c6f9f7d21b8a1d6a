"""`dev.layouts` gives a result file today's layouts, and a new seal, so that `lmsys verify` still accepts the file.

A layout says how the report shows a benchmark; {"place": 1} is a short one. A seal is a checksum of a file's content.
"""

import json
from typing import Any

import pytest

from dev.layouts import with_layouts
from lmsys.bench.record import older_file_seal, seal
from tests.support.records import content_of, record


def sealed(older: bool) -> dict[str, Any]:
    """The content of a result file with its seal; `older`: the seal of lmsys 0.1, which does not cover layouts."""
    ours = content_of([record("attention", "naive")])
    content: dict[str, Any] = json.loads(json.dumps({"benchmarks": [], "lmsys": ours}))
    ours = content["lmsys"]
    # "others" is the checksum of the rest of the file; any will do here.
    ours |= {"layouts": {"attention": {"place": 1}}} | ({} if older else {"others": "0" * 64})
    ours["seal"] = older_file_seal(ours) if older else seal(ours)
    return content


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("older", [True, False])
def test_layouts_are_those_of_today_and_seals_stay_valid(older: bool, indent: int | None) -> None:
    content = sealed(older)
    layouts = {"attention": {"place": 7}, "another": {}}
    made = json.loads(with_layouts(json.dumps(content, indent=indent), layouts))
    ours = made["lmsys"]
    assert ours["seal"] == (older_file_seal(ours) if older else seal(ours))
    assert ours.pop("layouts") == {"attention": {"place": 7}}
    unsealed = {name: x for name, x in content["lmsys"].items() if name not in ("layouts", "seal")}
    assert made == content | {"lmsys": unsealed | {"seal": ours["seal"]}}


def test_other_files_stay_as_they_are() -> None:
    assert with_layouts('{"a":  [1]}', {}) == '{"a":  [1]}'
