"""`lmsys check` on attention: its table of what holds, and the tasks that call a row more than once.

The table (`Holds`, lmsys/check/question.py) counts for each aspect, such as "causal mask", how many cases are right,
wrong or refused, separately for forward and backward. The check goes on after a wrong or refused case. `full_of_16` and
`NoBackward` are checked with all cases. The rows from `shared` on are right in a single call, and wrong in one of USES
(lmsys/check/cases.py), each of which calls a row more than once: see test_mistakes_that_a_single_call_does_not_show.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmsys.check import attention
from lmsys.check.cases import USES, Task, larger, tasks
from lmsys.check.kinds import RIGHT, WRONG, check
from lmsys.check.question import Fault, Holds, Options
from lmsys.registry import Entry
from tests.support.wrong_kernels import attend

OPTIONS = Options(head_dim=32, dtypes=("float32",))


def full_of_16(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Right without a mask; ignores `causal`, and refuses a number of queries that is no multiple of 16."""
    assert not q.shape[2] % 16
    return attend(q, k, v, scale=scale)


class NoBackward(torch.autograd.Function):
    """Attention of a single head, with a right forward and a backward that raises."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return attend(q[:, None], k[:, None], v[:, None], causal=is_causal)[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError


def with_sums(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Any:
    """It returns a second tensor, which nobody asks for."""
    return attend(q, k, v, causal=causal, scale=scale), q.sum(-1)


def with_sums_by_place(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
    return attend(q, k, v, causal=is_causal), q.sum(-1)


def check_to_table(
    name: str, options: Options, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], list[Any]]:
    """The exit code of a check, its table as a dictionary, and the mistake (or None) of each case that is wrong."""
    code = check(Entry(name, f"{__name__}:{name}"), options, as_json=True)
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["verdict"] == ("right" if code == RIGHT else "wrong")
    return code, last["holds"], [line["mistake"] for line in lines if line["verdict"] == "wrong"]


def test_a_wrong_or_refused_case_does_not_end_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, holds, mistakes = check_to_table("full_of_16", OPTIONS, capsys)
    # Three cases are wrong. A check searches for the mistake behind the first alone.
    assert code == WRONG and mistakes == ["the causal mask is ignored", None, None]
    assert holds.pop("causal mask") == {"forward": {"wrong": 3}, "backward": {}}
    assert holds.pop("odd lengths") == {"forward": {"refused": 2}, "backward": {}}
    refusing = {aspect for aspect, directions in holds.items() if "refused" in directions["forward"]}
    assert refusing == {"queries and keys of different number", "lengths of models", "extreme scores"}
    assert not any("wrong" in counts for directions in holds.values() for counts in directions.values())
    # Strides are tested in lengths that the row takes.
    assert holds["strides"] == {"forward": {"right": 6}, "backward": {"right": 6}}


def test_a_missing_backward_leaves_the_forward_judged(capsys: pytest.CaptureFixture[str]) -> None:
    code, holds, _ = check_to_table("NoBackward", OPTIONS, capsys)
    assert code == WRONG  # no backward is right
    assert check(Entry("NoBackward", f"{__name__}:NoBackward"), OPTIONS) == WRONG
    report = capsys.readouterr().out
    assert "--forward asks for the forward alone" in report and "--layout" not in report
    assert all(
        [*directions["forward"]] == ["right"] and [*directions["backward"]] == ["refused"]
        for directions in holds.values()
    )
    assert check(Entry("NoBackward", f"{__name__}:NoBackward"), replace(OPTIONS, grad=False)) == RIGHT
    report = capsys.readouterr().out
    assert "not asked: it takes no scale" in report
    assert report.count(": right\n") == sum(directions["forward"]["right"] for directions in holds.values())


@pytest.mark.parametrize("name", ["with_sums", "with_sums_by_place"])
def test_a_row_that_returns_several_tensors_is_refused_in_words(name: str) -> None:
    fault = next(attention.questions(Entry(name, f"{__name__}:{name}"), OPTIONS)).judge()
    assert fault is not None and fault.raises
    assert "it returns a tuple: return o alone" in fault.text


BUFFER = torch.zeros(1, 2, 64, 32)  # of the shape of SIMPLE's results
KEPT: dict[Any, Tensor] = {}  # what the rows below keep from one call to the next


def shared(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """All of its results are the same buffer: a second call overwrites the result of the first. Has no backward."""
    return BUFFER.copy_(attend(q, k, v, causal=causal, scale=scale))


class _Remembers(torch.autograd.Function):
    """Attention whose forward keeps its inputs in `memory`, where its backward reads them, and may zero them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, memory: dict[Any, Tensor], zeroes: bool
    ) -> Tensor:
        memory["qkv"] = torch.stack([q, k, v])
        ctx.options, ctx.memory, ctx.zeroes = (causal, scale), memory, zeroes
        return attend(q, k, v, causal=causal, scale=scale)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in ctx.memory["qkv"]]
            o = attend(*leaves, causal=ctx.options[0], scale=ctx.options[1])
        if ctx.zeroes:
            ctx.memory["qkv"].zero_()
        return *torch.autograd.grad(o, leaves, do), None, None, None, None


def keeps(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Its backward reads the inputs of the last forward, whichever forward it belongs to."""
    return _Remembers.apply(q, k, v, causal, scale, KEPT, False)


def frees(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Its backward overwrites its saved inputs with zeros, so a second backward is wrong."""
    return _Remembers.apply(q, k, v, causal, scale, {}, True)


def caches(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Copies keys and values once for each address, so it does not see that they have changed in place."""
    kept = KEPT.setdefault((k.data_ptr(), v.data_ptr()), torch.stack([k, v]))
    return attend(q, *kept, causal=causal, scale=scale)


def not_thread_safe(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Keeps the queries in a global for a while: two calls at once both read those of the later one."""
    import time

    KEPT["q"] = q
    time.sleep(0.05)
    return attend(KEPT["q"], k, v, causal=causal, scale=scale)


SIMPLE = next(task.case for task in tasks("cpu", capability=None, head_dim=32))  # one tile, without a mask


@pytest.mark.parametrize(
    ("row", "tensor", "about"),
    [
        (keeps, "dq", "two forwards before a backward"),
        (frees, "dq", "a second backward"),
        (caches, "o", "inputs that change between calls"),
        (not_thread_safe, "o", "calls from two threads"),
    ],
)
def test_mistakes_that_a_single_call_does_not_show(row: Callable[..., Tensor], tensor: str, about: str) -> None:
    KEPT.clear()
    by_use = {task.about: task for task in larger(SIMPLE) if task.use}
    assert by_use.keys() > USES.keys()
    fault = attention.failure(row, by_use[about], grad=True, seed=0)
    mistake = f"{tensor} is right in a single call on contiguous inputs, and wrong for {about}"
    assert fault is not None and fault.mistake == mistake
    # In a single call, on inputs of another seed: what the row has kept must not be right by chance.
    assert attention.failure(row, replace(by_use[about], use=None), grad=True, seed=7) is None
    assert attention.failure(attend, by_use[about], grad=True, seed=0) is None


@pytest.mark.parametrize("option", ["causal mask", "scale"])
def test_a_way_of_its_own_without_gradients(option: str) -> None:
    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return attend(q, k, v, causal=causal, scale=scale) if torch.is_grad_enabled() else attend(q, k, v)

    task = next(task for task in larger(SIMPLE) if task.about == f"{option}, without gradients")
    assert attention.failure(row, task, grad=True, seed=0) is not None
    assert attention.failure(row, replace(task, use=None), grad=True, seed=0) is None
    assert attention.failure(attend, task, grad=True, seed=0) is None


def test_one_query_under_a_causal_mask_sees_the_first_key_alone() -> None:
    def row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return attend(q, k, v, causal=causal and q.shape[2] > 1, scale=scale)

    asked = [task for task in tasks("cpu", capability=None, head_dim=32) if task.case.dtype == "float32"]
    wrong = [task.about for task in asked if attention.failure(row, task, grad=True, seed=0)]
    assert wrong == ["one query, causal"]


def half_alone(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Refuses float32, and ignores the scale; its causal mask is at the bottom right."""
    assert q.dtype != torch.float32
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16",)], ids=len)
def test_a_row_without_float32_is_asked_everything_in_another_dtype(
    dtypes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, holds, _ = check_to_table("half_alone", replace(OPTIONS, dtypes=dtypes), capsys)
    wrong = {aspect for aspect, directions in holds.items() if "wrong" in directions["forward"]}
    assert code == WRONG and wrong == {"queries and keys of different number", "scale"}
    assert all(
        "right" in directions["forward"] for aspect, directions in holds.items() if aspect not in ("float32", "scale")
    )


def no_scale_in_float16(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    return attend(q, k, v, causal=causal, scale=None if q.dtype == torch.float16 else scale)


def one_batch_of_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """A single query, as in decoding, sees the keys of the first batch."""
    return attend(q, k[:1].expand_as(k) if q.shape[2] == 1 else k, v, causal=causal, scale=scale)


def strides_of_queries(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Steps through the batches of contiguous keys by the strides of the queries."""
    if k.is_contiguous() and q.shape[2] < k.shape[2]:
        k = k.as_strided(k.shape, (q.stride(0), *k.stride()[1:]))
    return attend(q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (no_scale_in_float16, ["a scale of its own, float16"]),
        (one_batch_of_keys, ["one query, float32"]),
        (
            strides_of_queries,
            ["more keys than queries, float32", "more keys than queries, causal, float32", "one query, float32"],
        ),
    ],
)
def test_mistakes_in_one_dtype_or_behind_the_first_batch(row: Callable[..., Tensor], wrong: list[str]) -> None:
    asked = {f"{task.about}, {task.case.dtype}": task for task in tasks("cpu", capability=None, head_dim=32)}
    assert [name for name, task in asked.items() if attention.failure(row, task, grad=False, seed=0)] == wrong


def test_results_that_share_a_buffer() -> None:
    task = next(task for task in larger(SIMPLE) if task.use is USES["two forwards before a backward"])
    fault = attention.failure(shared, task, grad=False, seed=0)
    assert fault is not None and "share a buffer" in str(fault.mistake) and not fault.backward


def test_the_table_counts_and_prints() -> None:
    holds = Holds(grad=True)
    assert not holds.right
    holds.add("scale", None)
    assert holds.right and "refused" not in str(holds)
    holds.add("scale", Fault("", raises=True, backward=True))
    assert holds.right and "refused" in str(holds)
    holds.add("mask", Fault("", backward=True))
    assert not holds.right
    holds.add("dtype", Fault("", raises=True))
    assert [" ".join(line.split()) for line in str(holds).splitlines()] == [
        "forward backward",
        "scale right refused: 1 of 2",
        "mask right wrong",
        "dtype refused not judged",
    ]
    assert "backward" not in str(Holds(grad=False))


def test_rarer_aspects_are_tested_in_forms_that_a_row_passes() -> None:
    """Strides are tested at an odd length with a mask, unless the row has failed odd lengths or the mask."""

    def strides_tasks(*failed_aspects: str) -> list[Task]:
        return [
            task
            for task in tasks("cpu", None, passes=lambda task: task.aspect not in failed_aspects)
            if task.aspect == "strides"
        ]

    assert {(task.case.queries, task.case.causal) for task in strides_tasks()} == {(237, True)}
    assert {(task.case.queries, task.case.causal) for task in strides_tasks("odd lengths")} == {(256, True)}
    assert {(task.case.queries, task.case.causal) for task in strides_tasks("odd lengths", "causal mask")} == {
        (256, False)
    }
