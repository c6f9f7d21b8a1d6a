"""The parts of assignments 1 and 2, 2025 and 2026: by which adapter each is asked, what of it the handout promises."""

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lmsys.check import attention, holds, kinds, laptop, strategy
from lmsys.check.question import Fault, Options, Question, poison
from lmsys.extremes.strategy import trials
from lmsys.registry import Entry

BEYOND_S = 30.0  # of a part: after it nothing is asked that goes beyond the handout
Questions = Iterator[tuple[Question, bool]]  # and whether each goes beyond the handout
OF_DDP = ("one step", "several steps", "small buckets", "tied weights", "frozen parameters")
MISSING = ("FileNotFoundError", "ConnectionError")  # a file of the course, or one that its tests fetch
UNJUDGED = {"NotImplementedError": "not written"} | dict.fromkeys(
    ("ModuleNotFoundError", "ImportError", *MISSING), "not judged"
)


def _of_kind(kind: str, name: str, asked: tuple[str, ...] = ()) -> Questions:
    """Those that `lmsys check` asks. The handout asks the ordinary ones in float32, or only those that are named."""
    room = "tests" if kind in ("loss", "sharded_optimizer") else "lmsys.course"
    options = Options(grad=kind == "loss", dtypes=("float32", "bfloat16"))
    for question in kinds.KINDS[kind].questions(Entry(name, f"{room}.adapters:{name}"), options):
        ordinary = question.about.endswith("float32") and not question.extreme
        yield question, question.about not in asked if asked else not ordinary


def _of_fsdp() -> Questions:
    """Sizes that the ranks divide, as the course's tests have them."""
    asked = [replace(trial, vocabulary=96, width=64) for trial in trials(2, 0)[:2]]
    return (
        (question, False)
        for question in strategy.questions(
            Entry("Fsdp", "lmsys.course.adapters:Fsdp"), Options(), trials=lambda *_: asked
        )
    )


def _of_flash(name: str, grad: bool) -> Questions:
    """Forward or backward, in what the handout promises, and behind the forward what `lmsys check` asks any attention.

    A function in PyTorch may ignore the mask.
    """
    entry = Entry(name, f"lmsys.course.adapters:{name}")
    yield from ((x, False) for x in attention.of_a_handout(entry, Options(grad=grad), name == "flash_triton"))
    yield from ((x, True) for x in attention.questions(entry, Options(dtypes=("float32", "bfloat16"))) if not grad)


def _of_tests(names: str) -> Questions:
    """The course's own tests, as they are in the checkout, for what `lmsys check` has no kind of."""
    yield Question("the course's tests", partial(_tested, names)), False


def _tested(names: str) -> Fault | None:
    """The first failure. Where no test runs, for want of a package or of a file of the course, nothing is judged."""
    options = ["tests", "-q", "-rf", "-p", "no:cacheprovider", "-k", names]
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "from lmsys.check import laptop; laptop.install(); import sys, pytest; pytest.main(sys.argv[1:])",
            *options,
        ],
        capture_output=True,
        text=True,
    ).stdout
    failed = [x for x in said.splitlines() if x.startswith("FAILED") and not any(kind in x for kind in MISSING)]
    if failed or " passed" in said:
        return Fault(f"  {failed[0]}") if failed else None
    return Fault(f"  none runs: {next((x for x in said.splitlines() if x.startswith('E  ')), 'ImportError')}")


PYTORCH, TRITON = (f"get_flashattention_autograd_function_{name}" for name in ("pytorch", "triton"))
TESTS = {
    "linear layer": ("run_linear", "test_linear"),
    "embedding": ("run_embedding", "test_embedding"),
    "SiLU": ("run_silu", "test_silu"),
    "softmax": ("run_softmax", "test_softmax"),
    "rotary positions": ("run_rope", "test_rope"),
    "attention with a mask": ("run_scaled_dot_product_attention", "scaled_dot_product_attention"),
    "multi-head attention": ("run_multihead_self_attention", "test_multihead_self_attention and not rope"),
    "multi-head attention, rotary": ("run_multihead_self_attention_with_rope", "attention_with_rope"),
    "Transformer block": ("run_transformer_block", "test_transformer_block"),
    "Transformer LM": ("run_transformer_lm", "test_transformer_lm"),
    "gradient clipping": ("run_gradient_clipping", "test_gradient_clipping"),
    "learning-rate schedule": ("run_get_lr_cosine_schedule", "test_get_lr_cosine_schedule"),
    "batches": ("run_get_batch", "test_get_batch"),
    "checkpoints": ("run_save_checkpoint", "test_checkpointing"),
    "BPE training": ("run_train_bpe", "test_train_bpe and not speed"),
    "BPE encoding": ("get_tokenizer", "test_tokenizer and not memory"),
}
PARTS: dict[str, tuple[str, Callable[[], Questions]]] = {  # the adapter and the questions
    **{about: (adapter, partial(_of_tests, names)) for about, (adapter, names) in TESTS.items()},
    "RMSNorm": ("run_rmsnorm", partial(_of_kind, "norm", "norm")),
    "SwiGLU": ("run_swiglu", partial(_of_kind, "swiglu", "swiglu")),
    "cross-entropy": ("run_cross_entropy", partial(_of_kind, "loss", "run_cross_entropy")),
    "AdamW": ("get_adamw_cls", partial(_of_kind, "optimizer", "adamw")),
    "FlashAttention in PyTorch, forward": (PYTORCH, partial(_of_flash, "flash_pytorch", False)),
    "FlashAttention in PyTorch, backward": (PYTORCH, partial(_of_flash, "flash_pytorch", True)),
    "FlashAttention in Triton, forward": (TRITON, partial(_of_flash, "flash_triton", False)),
    "FlashAttention in Triton, backward": (TRITON, partial(_of_flash, "flash_triton", True)),
    "DDP": ("get_ddp", partial(_of_kind, "strategy", "Ddp", OF_DDP)),
    "DDP, each parameter": ("get_ddp_individual_parameters", partial(_of_kind, "strategy", "Individual", OF_DDP)),
    "DDP, bucketed": ("get_ddp_bucketed", partial(_of_kind, "strategy", "Bucketed", OF_DDP)),
    "FSDP": ("get_fsdp", _of_fsdp),
    "sharded optimizer": (
        "get_sharded_optimizer",
        partial(
            _of_kind,
            "sharded_optimizer",
            "get_sharded_optimizer",
            ("SGD with momentum, one step", "SGD with momentum", "AdamW", "AdamW, tied weights"),
        ),
    ),
}


def ask(about: str, beyond_s: float) -> dict[str, Any]:
    """What is said of a part, in a process whose path begins with the checkout: see docs/course.md.

    beyond_s  the time until which it is asked what goes beyond the handout
    """
    poison(setattr)
    laptop.install()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")  # of masked lanes
    start, held, right, notes = time.perf_counter(), holds.Holds(grad=True), 0, dict[str, None]()
    for question, beyond in PARTS[about][1]():
        reason = f"{beyond_s:g} s were up" if beyond and time.perf_counter() - start > beyond_s else question.reason
        if reason is not None:
            notes[f"not asked: {reason}"] = None
            continue
        fault = question.judge()
        if beyond:
            held.add(question.aspect or question.about, fault)
        elif fault is not None:
            text = f"{question.about}: {fault.text.strip()}"
            return {"verdict": verdict_of(text), "text": text, "mistake": fault.mistake}
        right += not beyond
    return {"verdict": "right", "cases": right, "beyond": held.worst(), "notes": [*notes]}


def verdict_of(failure: str) -> str:
    """Of what is said of a failure: "wrong", or of an exception that says nothing of what is written, another."""
    return next((UNJUDGED[kind] for kind in UNJUDGED if kind in failure), "wrong")
