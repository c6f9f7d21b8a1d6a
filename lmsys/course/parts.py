"""The parts of CS336's assignments 1 and 2, of 2025 and 2026: PARTS has each part's adapter and questions.

`lmsys course` calls `ask` in a worker process for the verdict on one part. A part is a piece of a student's work; its
adapter is the function of the course's tests/adapters.py that calls it. The handout is the text of the assignment. A
new part is an entry of PARTS, with questions as in basics.py, and a line of the table in docs/course.md. Some parts are
asked questions of `lmsys check`, which `_of_kind` finds by their words: if these change there, change them here, too.
"""

import json
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lmsys import commands, registry, testing
from lmsys.bench.findings import interpreted_kernels
from lmsys.check import attention, kinds
from lmsys.check.question import DIRECTIONS, Fault, Holds, Options, Question, poison
from lmsys.course import basics, basics_training, checkout, systems

BEYOND_S = 20.0  # seconds of a part, after which nothing is asked that goes beyond the handout
# Verdicts on a part.
RIGHT, WRONG, REFUSED, NOT_WRITTEN, NOT_JUDGED = "right", "wrong", "refused", "not written", "not judged"
INSTALLED_AS = {  # by the name of a module, the package that pip installs
    "yaml": "PyYAML",
    "sklearn": "scikit-learn",
    "hydra": "hydra-core",
    "PIL": "pillow",
}
# The fault of a part in Triton whose questions launched no kernel. By its text the verdict is NOT_WRITTEN.
NO_KERNEL = Fault("  NotImplementedError: the results are right, but no Triton kernel makes them", raises=True)

# By a pattern of an exception's text: the verdict on the part. The first pattern that fits counts; if none does, the
# verdict is REFUSED.
VERDICTS = {
    r"NotImplementedError.*(interpreter mode|Could not run)": NOT_JUDGED,  # raised by Triton or torch
    r"NotImplementedError": NOT_WRITTEN,  # raised by the course's template
    r"ModuleNotFoundError|ImportError|FileNotFoundError|ConnectionError": NOT_JUDGED,
    # Something fails or is missing: in the first line a compiler, in the others a GPU, its driver, NCCL, or Triton.
    r"InductorError|BackendCompilerFailed|Cpp\w*Error|InternalTorchDynamoError|dynamo|CompilationError": NOT_JUDGED,
    r"NVIDIA|CUDA (error|driver)|compiled with CUDA|No CUDA|cudart|active driver|dummy base class": NOT_JUDGED,
    r"[Nn][Cc][Cc][Ll]|Did you forget to add @triton.jit": NOT_JUDGED,
}


@dataclass(frozen=True)
class Part:
    """A part of an assignment.

    adapter    the name of its function in tests/adapters.py
    questions  yields (question, True if it goes beyond the handout): see basics.py
    asks       what the handout asks, in words
    backward   the direction whose answers count for aspects beyond the handout. True: the backward; False: the forward
    """

    adapter: str
    questions: Callable[[], basics.Questions]
    asks: str
    backward: bool = False


def _of_kind(kind: str, name: str, asked: str) -> basics.Questions:
    """The questions of `lmsys check` for a kind.

    name   the function or class of systems.py that is asked; it calls the adapter
    asked  a pattern. Questions whose `about` begins with a match are the handout's, all others go beyond it
    """
    for question in kinds.KINDS[kind].questions(
        registry.Entry(name, f"{systems.__name__}:{name}"), Options(grad=False, dtypes=("float32", "bfloat16"))
    ):
        yield question, not re.match(asked, question.about)


def _of_flash(name: str, backward: bool) -> basics.Questions:
    """The handout's cases of attention, forward or backward; then, beyond the handout, the questions of `lmsys check`.

    The handout allows the function in PyTorch to ignore the causal mask.

    name  "flash_pytorch" or "flash_triton", a class of systems.py
    """
    entry = registry.Entry(name, f"{systems.__name__}:{name}")
    causal = name == "flash_triton"
    with interpreted_kernels() as launched:  # a list of the kernels that Triton's interpreter runs
        for question in attention.of_a_handout(
            entry, Options(grad=backward), causal, use=None if backward else saved_lse
        ):
            yield question, False
        if causal and not backward and not launched and os.environ.get("TRITON_INTERPRET") == "1":
            yield Question("its kernels", lambda: NO_KERNEL), False
    # The handout's last question again: a second call goes beyond the handout.
    yield replace(question, aspect="a second call"), True
    options = Options(grad=backward, dtypes=("float32", "bfloat16"))
    yield from ((question, True) for question in attention.questions(entry, options))
    yield from ((question, True) for question in attention.of_a_handout(entry, options, causal, attention.SHORT))


def saved_lse(call: Callable[..., Tensor], inputs: testing.Inputs, grad: bool) -> dict[str, Tensor]:
    """The outputs by name: the result o, and lse, the log-sum-exp that the call saves for its backward.

    `attention.of_a_handout` gets this function as its `use`, and so calls it in place of a single call of the row and
    its backward. ValueError unless the call saves exactly one tensor of shape (batch, queries).
    """
    o, shape = call(*inputs.leaves(True)), (inputs.q.shape[0] * inputs.q.shape[1], inputs.q.shape[2])
    node: Any = o.grad_fn
    while not hasattr(node, "saved_tensors") and getattr(node, "next_functions", None):  # a node may be None
        node = node.next_functions[0][0]
    saved = [x for x in getattr(node, "saved_tensors", ()) if x is not None and x.shape == shape]
    if len(saved) != 1:
        raise ValueError(f"the handout asks for one saved tensor of shape (batch, queries), and there are {len(saved)}")
    return {"o": o.detach().clone(), "lse": saved[0].detach().float().reshape(inputs.q.shape[:-1])}


LENGTHS = "float32, lengths of 128 and 256"  # this and DDP are words for `Part.asks`
DDP = "steps of SGD from rank 0's weights, tied weights, frozen parameters"
OF_DDP = "one step|several steps|small buckets|tied weights|frozen parameters"  # questions that the handout asks
PARTS: dict[str, Part] = {  # by name: Part(adapter, questions, what the handout asks)
    "linear layer": Part("run_linear", basics.linear, "x W^T"),
    "embedding": Part("run_embedding", basics.embedding, "rows by id"),
    "SiLU": Part("run_silu", basics.silu, "x sigmoid(x)"),
    "softmax": Part("run_softmax", basics.softmax, "any dimension, no overflow"),
    "RMSNorm": Part(
        "run_rmsnorm",
        partial(_of_kind, "norm", name="norm", asked=r"(?!rows|huge).*float32$"),
        "float32, eps within the root",
    ),
    "SwiGLU": Part("run_swiglu", partial(_of_kind, "swiglu", name="swiglu", asked=r".*float32$"), "float32"),
    "rotary positions": Part("run_rope", basics.rope, "neighbouring channels, positions (S,)"),
    "attention with a mask": Part(
        "run_scaled_dot_product_attention", basics.attention, "3 and 4 dimensions, queries and keys of different number"
    ),
    "multi-head attention": Part("run_multihead_self_attention", basics.multihead, "causal, without positions"),
    "multi-head attention, rotary": Part(
        "run_multihead_self_attention_with_rope", basics.multihead_with_rope, "causal, positions (1, S)"
    ),
    "Transformer block": Part("run_transformer_block", basics.block, "pre-norm, rotary"),
    "Transformer LM": Part("run_transformer_lm", basics.language_model, "logits, also of a shorter input"),
    "cross-entropy": Part(
        "run_cross_entropy",
        partial(
            _of_kind,
            "loss",
            name="cross_entropy",
            asked=r"(a few tokens|an odd vocab|a large vocab|more tokens|logits|equal).*float32$",
        ),
        "the mean over tokens, no overflow",
    ),
    "gradient clipping": Part(
        "run_gradient_clipping", basics_training.clipping, "the norm of all gradients; a parameter may have none"
    ),
    "AdamW": Part(
        "get_adamw_cls",
        partial(_of_kind, "optimizer", name="adamw", asked="(several steps|weight decay|other betas), float32"),
        "steps as torch's or the handout's order has them",
    ),
    "learning-rate schedule": Part(
        "run_get_lr_cosine_schedule", basics_training.schedule, "warm-up, cosine, the lowest rate behind it"
    ),
    "batches": Part("run_get_batch", basics_training.batches, "all windows, targets shifted by one"),
    "checkpoints": Part(
        "run_save_checkpoint", basics_training.checkpoints, "model, optimizer and iteration, in a file"
    ),
    "BPE training": Part(
        "run_train_bpe", basics_training.bpe_training, "the merges in their order, the tokens of the vocabulary"
    ),
    "BPE encoding": Part(
        "get_tokenizer", basics_training.bpe_encoding, "encode, decode, encode_iterable, special tokens"
    ),
    "FlashAttention in PyTorch, forward": Part(
        systems.CLASSES["flash_pytorch"],
        partial(_of_flash, "flash_pytorch", backward=False),
        f"{LENGTHS}, no mask, the saved log-sum-exp",
    ),
    "FlashAttention in PyTorch, backward": Part(
        systems.CLASSES["flash_pytorch"],
        partial(_of_flash, "flash_pytorch", backward=True),
        f"{LENGTHS}, no mask",
        backward=True,
    ),
    "FlashAttention in Triton, forward": Part(
        systems.CLASSES["flash_triton"],
        partial(_of_flash, "flash_triton", backward=False),
        f"{LENGTHS}, full and causal, the saved log-sum-exp, a Triton kernel",
    ),
    "FlashAttention in Triton, backward": Part(
        systems.CLASSES["flash_triton"],
        partial(_of_flash, "flash_triton", backward=True),
        f"{LENGTHS}, full and causal",
        backward=True,
    ),
    "DDP": Part("get_ddp", partial(_of_kind, "strategy", name="Ddp", asked=OF_DDP), DDP),
    "DDP, each parameter": Part(
        "get_ddp_individual_parameters", partial(_of_kind, "strategy", name="Individual", asked=OF_DDP), DDP
    ),
    "DDP, bucketed": Part(
        "get_ddp_bucketed", partial(_of_kind, "strategy", name="Bucketed", asked=OF_DDP), f"{DDP}, small buckets"
    ),
    "FSDP": Part(
        "get_fsdp", systems.fsdp, "steps of SGD of the course's layers, float32 and float16; a rank holds a share"
    ),
    "sharded optimizer": Part(
        "get_sharded_optimizer",
        partial(
            _of_kind, "sharded_optimizer", name="sharded_optimizer", asked="SGD with momentum|AdamW$|AdamW, tied|frozen"
        ),
        "SGD and AdamW, tied weights, frozen parameters; a rank keeps a share of the state",
    ),
}


# Adapters without kernels of their own: the worker process that asked them is used for the next part, too. After other
# adapters it is replaced, since a kernel may have damaged its process.
IN_ONE_PROCESS = {part.adapter for part in PARTS.values() if "run_" in part.adapter} | {
    "get_tokenizer",
    "get_adamw_cls",
}


def ask(about: str, beyond_s: float, progress: Path) -> dict[str, Any]:
    """The result of `judged` for the part `about`. __main__.py calls it in a worker, whose folder is the checkout.

    progress  the file that gets each note of `judged`, as JSON
    """
    poison(setattr)  # for the rest of this process: memory that is left unwritten is NaN
    systems.prepare()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")  # on masked lanes
    checkout.load()
    return judged(PARTS[about], beyond_s, lambda *values: progress.write_text(json.dumps(values)))


def judged(part: Part, beyond_s: float, note: Callable[..., object] = lambda *_: None) -> dict[str, Any]:
    """The verdict on a part and its reasons: the fields in docs/course.md.

    beyond_s  seconds after which nothing is asked that goes beyond the handout
    note      called before each question with its name, its aspect, and the verdict so far: None until all of the
              handout was asked
    """
    held, right, notes = Holds(grad=part.backward), 0, dict[str, None]()
    start, direction = time.perf_counter(), DIRECTIONS[part.backward]
    answer: dict[str, Any] = {}
    try:
        for question, beyond in part.questions():
            is_late, aspect = beyond and time.perf_counter() - start > beyond_s, question.aspect or question.about
            note(question.about, aspect, answer if beyond else None)
            # A reason completes "Not asked: ...".
            if reason := f"more of a part, as its {beyond_s:g} s were up" if is_late else question.reason:
                notes[reason] = None
                continue
            fault = _fault_of(question)
            if beyond:
                held.add(aspect, fault)
            elif fault is not None:
                return _failed(f"{question.about}: {fault.text.strip()}", fault)
            right += not beyond
            answer = {"verdict": RIGHT, "cases": right, "beyond": held.worst(direction), "notes": list(notes)}
    except Exception as error:  # raised by the adapter, which is called while the questions are made
        fault = Fault.raised(error)
        return _failed(fault.text.strip(), fault)
    return answer | {"notes": list(notes)}


def _fault_of(question: Question) -> Fault | None:
    """The fault of the answer, an exception included; None if it is right."""
    try:
        return question.judge()
    except Exception as error:
        return Fault.raised(error)


def _failed(text: str, fault: Fault) -> dict[str, Any]:
    """The fields of a part that fails. Paths are relative to the checkout; a missing package gets its pip command."""
    text, missing = text.replace(f"{Path.cwd()}/", ""), re.search(r"No module named '(\w+)", text)
    advice = (
        f"; {commands.PIP} {INSTALLED_AS.get(missing[1], missing[1])}" if missing and "cs336" not in missing[1] else ""
    )
    return {"verdict": verdict_of(text, fault.raises), "text": text + advice, "mistake": fault.mistake}


def verdict_of(text: str, raises: bool) -> str:
    """The verdict on a part that fails with this text. raises: by an exception, for which VERDICTS are looked up."""
    named = (verdict for pattern, verdict in VERDICTS.items() if re.search(pattern, text))
    # " raises " is in the texts of `Fault.raised`, and of ranks that fail.
    return next(named, REFUSED) if raises or " raises " in text else WRONG
