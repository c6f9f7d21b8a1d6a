"""Arguments: a public call works, or raises a ValueError whose message names the parameter.

A `Call` has for each parameter a right value, and the names of those VALUES that are right for it too: all others are
wrong. A test gives each of VALUES to one parameter, and right values to all others. A right value must be taken, and a
wrong one refused: no other error may come from deep inside. A new function of docs/api.md needs a line in CALLS.

Left out are functions that take only tensors: a step calls them often, and torch's own TypeError must do. Left out are
also parameters of torch's classes, from which ours derive, and those that only other parts of lmsys give.

The last tests give unusual arguments that are right: layers take those of torch's layers; wrapped models, derived
configurations and the like are taken, since they can do what is needed, though their classes are others.
"""

import io
import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from lmsys import values
from lmsys.attention import Documents
from lmsys.config import ModelConfig
from lmsys.model import TransformerLM, loss, transformer
from lmsys.model.rotary import RotaryEmbedding
from lmsys.parallel import adapter, baselines, copy_engine, fsdp, group, overlapped, sharded_optimizer, zero1
from lmsys.tokenizer import Tokenizer, train
from lmsys.training import (
    checkpoint,
    config,
    corpora,
    data,
    evaluation,
    generation,
    loop,
    optimizer,
    sampling,
)
from lmsys.training.config import RunConfig
from lmsys.training.muon import Muon
from lmsys.training.optimizer import AdamW

ROOT = Path(__file__).parents[1]
VALUES: dict[str, Any] = {
    "None": None,
    "text": "3",
    "bytes": b"3",
    "half": 3.5,
    "minus": -1,
    "zero": 0,
    "true": True,
    "list": [],
    "dict": {},
    "entries": [None],
    "object": object(),
    "nan": math.nan,
    "inf": math.inf,
    "huge": 2**70,
}
# The names of VALUES that are right for a parameter of this kind. A name with "?" is not tested: whether that value is
# right depends on something else, such as files, or is left to torch.
NONE: set[str] = set()
INDEX = {"zero"}
WHOLE = {"zero", "minus"}
POSITIVE = {"half", "huge?"}  # torch may refuse an int that is too large for a kernel's float
AMOUNT = POSITIVE | INDEX
FLAG = {"true"}
TEXT = {"text"}
OR_NONE = {"None"}
FILE = {"text?"}  # a path, of a file that must be there
DEVICE = {"None", "text?", "zero?", "minus?", "true?", "huge?"}  # numbers are devices where there is a GPU
UNJUDGED = {f"{name}?" for name in VALUES}


class Call(NamedTuple):
    """A public callable.

    parameters  by name: (a right value, the names of VALUES that are right too). A right value that is a `partial` is
                called, so that each call gets a new one
    use         a function that is called with the result, and may raise the error as well
    """

    function: Callable[..., Any]
    parameters: dict[str, tuple[Any, set[str]]]
    use: Callable[[Any], Any] = lambda result: result


CONFIG = ModelConfig(8, 16, 1, 2, vocab_size=300, context_length=16, attention="naive")
TINY = RunConfig(model=CONFIG, train=config.TrainConfig(batch_size=2, micro_batch_size=2, device="cpu"))
IDS = np.arange(100) % 250
BYTES = {number: bytes([number]) for number in range(256)}
MODULE = partial(nn.Linear, 2, 3)


class Tokens:
    """A source of token ids, as the trainer reads it."""

    end_of_text = 7

    def __len__(self) -> int:
        return len(IDS)

    def read(self, start: int, stop: int) -> np.ndarray:
        return IDS[start:stop].astype(np.int64)


SOURCE = Tokens()
WINDOWS = data.fixed_windows(SOURCE, 16, 2)


@cache
def model() -> TransformerLM:
    return TransformerLM(CONFIG)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(BYTES, [], ["<|endoftext|>"])


def parameter() -> list[nn.Parameter]:
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    return [p]


def step(optimizer: Any) -> Any:
    optimizer.step()


def group_without_processes(**given: Any) -> group.WorkerGroup:
    """A `WorkerGroup` whose ranks are not started. Tests of it, with ranks, are in tests/parallel/test_group.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.processes, "Worker", lambda *_, **__: Mock())
        patch.setattr(group.dist, "TCPStore", Mock())
        patch.setattr(group.WorkerGroup, "_collect", Mock())
        return group.WorkerGroup(**given)


# Parameters that several callables have: OF_ADAMW also those of Muon, OF_BOTH those of both losses.
OF_ADAMW = {
    "params": (partial(parameter), {"text?", "bytes?", "entries?"}),
    "lr": (1e-3, AMOUNT),
    "betas": ((0.9, 0.95), NONE),
    "eps": (1e-8, AMOUNT),
    "weight_decay": (0.1, AMOUNT),
}
OF_LOSS = {
    "reduction": ("mean", NONE),
    "label_smoothing": (0.1, INDEX),
    "z_loss": (1e-4, AMOUNT),
    "softcap": (30.0, POSITIVE | OR_NONE),
    "ignore_index": (-100, WHOLE),
}
OF_BOTH = OF_LOSS | {"token_weights": (torch.ones(3), OR_NONE), "return_z_loss": (False, FLAG)}
OF_STRATEGY = {"module": (MODULE, NONE), "process_group": (None, OR_NONE)}
BUCKETS = {"bucket_mb": (25, POSITIVE | OR_NONE)}
OF_CONFIG = {
    "d_model": (8, NONE), "d_ff": (16, NONE), "num_layers": (1, NONE), "num_heads": (2, NONE),
    "num_kv_heads": (2, OR_NONE), "vocab_size": (300, NONE), "context_length": (16, NONE),
    "rope_theta": (1e4, POSITIVE), "norm_eps": (1e-5, POSITIVE), "attention": ("naive", TEXT),
    "checkpoint_blocks": (0, INDEX), "residual": ("wide", NONE),
}  # fmt: skip
OF_TRAIN = {
    "steps": (400, NONE), "batch_size": (16, NONE), "micro_batch_size": (8, NONE), "reproducible": (False, FLAG),
    "leaves": (4, NONE), "optimizer": ("adamw", NONE), "lr": (3e-3, {"half", "huge?"}), "min_lr": (3e-4, INDEX),
    "matrix_lr": (0.02, AMOUNT), "momentum": (0.9, INDEX), "adjust_lr_fn": ("original", NONE),
    "warmup_steps": (2, {"None", "zero"}), "betas": ((0.9, 0.95), NONE), "eps": (1e-8, POSITIVE),
    "weight_decay": (0.1, AMOUNT), "undecayed": ("ln", {"None", "text"}), "clip_norm": (1.0, AMOUNT),
    "seed": (0, INDEX), "precision": ("fp32", NONE), "compile": (False, FLAG), "fused": (False, FLAG),
    "graph": (False, FLAG), "strategy": ("bucketed", TEXT), "bucket_mb": (25.0, POSITIVE | OR_NONE),
    "sharded_optimizer": (False, FLAG), "device": ("cpu", {"None", "text"}),
    "memory_gib": (1.0, POSITIVE | OR_NONE), "threads": (1, OR_NONE), "max_nonfinite": (10, INDEX),
    "max_seconds": (1.0, POSITIVE | OR_NONE), "log_interval": (20, NONE),
}  # fmt: skip
CALLS: dict[str, Call] = {
    "ModelConfig": Call(ModelConfig, OF_CONFIG),
    "Linear": Call(transformer.Linear, {"in_features": (4, NONE), "out_features": (4, NONE)}),
    "Embedding": Call(transformer.Embedding, {"num_embeddings": (4, NONE), "embedding_dim": (4, NONE)}),
    "RMSNorm": Call(
        transformer.RMSNorm, {"normalized_shape": (4, {"list", "entries?"}), "eps": (1e-5, AMOUNT | OR_NONE)}
    ),
    "Attention": Call(
        transformer.Attention, {"d_model": (8, NONE), "num_heads": (2, NONE), "kv_heads": (1, OR_NONE)}
    ),
    "FeedForward": Call(transformer.FeedForward, {"d_model": (8, NONE), "d_ff": (8, NONE)}),
    "TransformerLM": Call(
        TransformerLM, {"config": (CONFIG, NONE), "device": ("cpu", DEVICE), "dtype": (torch.float32, NONE)}
    ),
    "compile_blocks": Call(TransformerLM(CONFIG).compile_blocks, {"together": (2, NONE)}),
    "hidden": Call(
        model().hidden,
        {"tokens": (torch.ones(1, 3, dtype=torch.int64), NONE), "positions": (torch.arange(3), OR_NONE),
         "documents": (Documents([[1, 2]]), OR_NONE)},
    ),
    "Loss": Call(transformer.Loss, {"model": (model(), NONE)}),
    "RotaryEmbedding": Call(
        RotaryEmbedding,
        {"head_dim": (4, NONE), "context_length": (4, NONE), "theta": (1e4, POSITIVE), "device": ("cpu", DEVICE)},
    ),
    "LossOptions": Call(loss.LossOptions, OF_LOSS),
    "cross_entropy": Call(
        loss.cross_entropy,
        {"logits": (torch.randn(3, 5), NONE), "targets": (torch.arange(3), NONE)} | OF_BOTH,
    ),
    "linear_cross_entropy": Call(
        loss.linear_cross_entropy,
        {"hidden": (torch.randn(3, 4), NONE), "weight": (torch.randn(5, 4), NONE), "targets": (torch.arange(3), NONE),
         "chunk": (2, OR_NONE)} | OF_BOTH,
    ),
    # data parallelism
    "NoSync": Call(baselines.NoSync, OF_STRATEGY),
    "Naive": Call(baselines.Naive, OF_STRATEGY),
    "Flat": Call(baselines.Flat, OF_STRATEGY),
    "Overlapped": Call(overlapped.Overlapped, OF_STRATEGY | {"comm_dtype": (torch.bfloat16, OR_NONE)}),
    "Bucketed": Call(overlapped.Bucketed, OF_STRATEGY | BUCKETS | {"comm_dtype": (torch.bfloat16, OR_NONE)}),
    "CopyEngine": Call(copy_engine.CopyEngine, OF_STRATEGY | BUCKETS | {"comm_dtype": (torch.bfloat16, OR_NONE)}),
    "Zero1": Call(zero1.Zero1, OF_STRATEGY | {"bucket_mb": (32, POSITIVE)}),
    "CopyEngineZero1": Call(zero1.CopyEngineZero1, OF_STRATEGY | {"bucket_mb": (32, POSITIVE)}),
    "Fsdp": Call(fsdp.Fsdp, OF_STRATEGY | {"compute_dtype": (torch.bfloat16, OR_NONE)}),
    "Adapter": Call(adapter.Adapter, {"strategy": (baselines.Flat, NONE), "module": (MODULE, NONE),
                                      "group": (None, OR_NONE)}),
    "make_optimizer": Call(
        baselines.NoSync(nn.Linear(2, 3)).make_optimizer, {"optimizer_cls": (AdamW, NONE), "groups": (None, OR_NONE)}
    ),
    "load_state_dict": Call(
        baselines.NoSync(nn.Linear(2, 3)).load_state_dict,
        {"state_dict": (nn.Linear(2, 3).state_dict(), {"dict?"})},
    ),
    "ShardedOptimizer": Call(
        sharded_optimizer.ShardedOptimizer,
        {"params": (partial(parameter), {"text?", "bytes?", "entries?"}), "optimizer_cls": (AdamW, NONE),
         "process_group": (None, OR_NONE), "flat_buffers": (None, {"None", "list"})},
    ),
    "WorkerGroup": Call(
        group_without_processes,
        {"world_size": (1, NONE), "backend": ("gloo", OR_NONE), "timeout_s": (60.0, {"half"}),
         "with_last_words": (False, FLAG), "environment": ({}, {"None", "dict"})},
        group.WorkerGroup.close,
    ),
    "check_backend": Call(group.check_backend, {"backend": ("gloo", NONE), "world_size": (2, NONE)}),
    # tokenizer
    "Tokenizer": Call(
        Tokenizer, {"vocab": (BYTES, NONE), "merges": ([], {"list"}), "special_tokens": (["<|a|>"], {"None", "list"})}
    ),
    "encode": Call(tokenizer().encode, {"text": ("ab", {"text", "bytes"})}),
    "encode_array": Call(tokenizer().encode_array, {"text": (b"ab", {"text", "bytes"})}),
    "encode_iterable": Call(
        tokenizer().encode_iterable, {"texts": (["ab"], {"list", "text", "dict"})}, list
    ),
    "decode": Call(tokenizer().decode, {"ids": ([1, 2], {"list"}), "errors": ("replace", UNJUDGED)}),
    "decode_bytes": Call(tokenizer().decode_bytes, {"ids": ([1, 2], {"list"})}),
    "save": Call(tokenizer().save, {"folder": ("a", TEXT)}),
    "load": Call(Tokenizer.load, {"folder": ("saved", FILE), "special_tokens": (["<|a|>"], {"None", "list"})}),
    "from_files": Call(
        Tokenizer.from_files,
        {"vocab": ("saved/vocab.json", FILE), "merges": ("saved/merges.txt", FILE),
         "special_tokens": (["<|a|>"], {"None", "list"})},
    ),
    "train": Call(
        train,
        {"files": ("text", FILE), "vocab_size": (300, NONE), "special_tokens": (["<|a|>"], {"None", "list"}),
         "processes": (1, NONE)},
    ),
    # training
    "AdamW": Call(AdamW, OF_ADAMW, step),
    "Muon": Call(
        Muon,
        OF_ADAMW
        | {"momentum": (0.9, INDEX), "nesterov": (True, FLAG), "adjust_lr_fn": ("original", NONE),
           "ns_coefficients": ((1.0, 2.0, 3.0), NONE), "ns_steps": (5, NONE), "ns_dtype": (torch.bfloat16, NONE),
           "batched": (True, FLAG), "use_muon": (True, FLAG), "flats": (None, UNJUDGED)},
        step,
    ),
    "undecayed": Call(optimizer.undecayed, {"module": (model(), NONE), "parts": ("ln", FILE)}),
    "cosine_schedule": Call(
        optimizer.cosine_schedule,
        {"step": (1, INDEX), "max_lr": (0.1, POSITIVE | {"zero?"}), "min_lr": (0.01, INDEX), "warmup_steps": (2, INDEX),
         "total_steps": (10, NONE)},
    ),
    "set_lr": Call(
        optimizer.set_lr,
        {"optimizer": (AdamW(parameter()), NONE), "lr": (0.1, UNJUDGED), "matrix_lr": (0.1, UNJUDGED)},
    ),
    "clip_grad_norm": Call(
        optimizer.clip_grad_norm,
        {"parameters": (partial(parameter), {"list", "entries?"}), "max_norm": (1.0, AMOUNT | {"inf"}),
         "eps": (1e-6, AMOUNT | {"inf"})},
    ),
    "grad_norm": Call(optimizer.grad_norm, {"parameters": (partial(parameter), {"list", "entries?"})}),
    "TrainConfig": Call(config.TrainConfig, OF_TRAIN),
    "DataConfig": Call(
        config.DataConfig,
        {"corpus": ("stdlib", TEXT), "valid": (None, TEXT | OR_NONE), "folder": (None, TEXT | OR_NONE),
         "url": ("http://a/b", NONE), "sha256": (None, OR_NONE), "valid_url": ("http://a/c", NONE),
         "valid_sha256": (None, OR_NONE), "tokenizer": (None, TEXT | OR_NONE), "processes": (1, OR_NONE),
         "packing": ("none", NONE)},
    ),
    "EvaluateConfig": Call(
        config.EvaluateConfig, {"interval": (1, WHOLE | {"huge"}), "windows": (1, NONE), "batch_size": (1, NONE)}
    ),
    "CheckpointConfig": Call(config.CheckpointConfig, {"interval": (1, WHOLE | {"huge"}), "keep": (1, OR_NONE)}),
    "GenerateConfig": Call(
        config.GenerateConfig,
        {"prompt": ("a", TEXT), "max_new_tokens": (1, INDEX), "temperature": (1.0, AMOUNT), "top_k": (1, OR_NONE),
         "top_p": (0.5, NONE), "seed": (1, INDEX)},
    ),
    "RunConfig": Call(
        RunConfig,
        {"output": ("a", TEXT), "data": (config.DataConfig(), NONE), "model": (CONFIG, NONE),
         "train": (config.TrainConfig(), NONE), "evaluate": (config.EvaluateConfig(), NONE),
         "checkpoint": (config.CheckpointConfig(), NONE), "generate": (config.GenerateConfig(), NONE)},
    ),
    "RunConfig.from_json": Call(RunConfig.from_json, {"text": ("{}", {"text?"})}),
    "RunConfig.changed": Call(RunConfig().changed, {"settings": ([], {"list"})}),
    "Batches": Call(
        data.Batches,
        {"source": (SOURCE, NONE), "context_length": (16, NONE), "batch_size": (2, NONE), "seed": (0, INDEX),
         "rank": (0, INDEX), "world_size": (1, NONE), "accumulation": (1, NONE), "neighbours": (False, FLAG),
         "end_of_text": (7, {"None", "zero"})},
        lambda batches: (batches.batch(0), batches.weight(0)),
    ),
    "Batches.batch": Call(
        data.Batches(SOURCE, 16, 2).batch, {"step": (0, INDEX), "micro": (0, INDEX)}
    ),
    "Batches.weight": Call(
        data.Batches(SOURCE, 16, 2).weight, {"step": (0, INDEX), "micro": (0, INDEX)}
    ),
    "fixed_windows": Call(
        data.fixed_windows,
        {"source": (SOURCE, NONE), "context_length": (16, NONE), "count": (2, NONE),
         "end_of_text": (7, {"None", "zero"})},
    ),
    "TokenFiles": Call(data.TokenFiles, {"paths": (["ids.npy"], NONE), "tokenizer": (tokenizer(), OR_NONE)}),
    "open_tokens": Call(data.open_tokens, {"path": ("ids.npy", FILE), "tokenizer": (tokenizer(), OR_NONE)}),
    "read_end_of_text": Call(data.read_end_of_text, {"path": ("ids.npy", FILE)}),
    "end_of_text": Call(data.end_of_text, {"tokenizer": (tokenizer(), NONE)}),
    "shards": Call(data.shards, {"output": (Path("a.npy"), UNJUDGED), "world_size": (2, NONE)}),
    "tokenize_files": Call(
        data.tokenize_files,
        {"tokenizer": (tokenizer(), NONE), "files": (["text"], NONE), "output": ("new.npy", TEXT),
         "processes": (1, NONE), "engine": (None, OR_NONE), "rank": (0, INDEX), "world_size": (1, NONE)},
    ),
    "get_batch": Call(
        sampling.get_batch,
        {"ids": (IDS, NONE), "batch_size": (2, NONE), "context_length": (4, NONE), "device": ("cpu", DEVICE),
         "generator": (None, OR_NONE)},
    ),
    "text_file": Call(corpora.text_file, {"path": ("text", FILE), "valid": ("text", FILE | OR_NONE)}),
    "corpus_of": Call(
        corpora.corpus_of, {"settings": (config.DataConfig(corpus="text"), NONE), "progress": (print, UNJUDGED)}
    ),
    "save_checkpoint": Call(
        checkpoint.save_checkpoint,
        {"model": (MODULE, NONE), "optimizer": (AdamW(parameter()), NONE), "iteration": (1, INDEX),
         "out": ("new.pt", TEXT)},
    ),
    "load_checkpoint": Call(
        checkpoint.load_checkpoint,
        {"src": ("saved.pt", FILE), "model": (MODULE, NONE), "optimizer": (AdamW(parameter()), NONE)},
    ),
    "checkpoint.save": Call(
        checkpoint.save,
        {"folder": (Path("folder"), TEXT), "step": (1, INDEX), "shared": ({}, UNJUDGED), "keep": (1, OR_NONE)},
    ),
    "checkpoint.newest": Call(checkpoint.newest, {"folder": (Path("folder"), TEXT), "verified": (True, UNJUDGED)}),
    "checkpoint.read": Call(checkpoint.read, {"manifest": (Path("folder/step-00000003.json"), FILE)}),
    "Sampling": Call(
        generation.Sampling, {"temperature": (1.0, AMOUNT), "top_k": (3, OR_NONE), "top_p": (0.5, NONE)}
    ),
    "generate": Call(
        generation.generate,
        {"model": (model(), NONE), "prompts": ([[1, 2]], NONE), "max_new_tokens": (2, INDEX),
         "sampling": (generation.Sampling(), OR_NONE), "stop": (1, {"None", "zero"}), "seed": (1, WHOLE),
         "use_cache": (True, FLAG), "vocab_size": (300, OR_NONE)},
    ),
    "evaluate": Call(
        evaluation.evaluate,
        {"model": (model(), NONE), "windows": (WINDOWS, {"list?"}), "batch_size": (2, NONE),
         "autocast": (nullcontext, NONE), "loss_of": (None, OR_NONE)},
    ),
    "Trainer": Call(
        loop.Trainer,
        {"config": (TINY, NONE), "source": (SOURCE, NONE), "windows": (WINDOWS, {"list?", "entries?"}),
         "device": (torch.device("cpu"), NONE), "saved": (None, OR_NONE), "facts": (None, {"None", "dict"}),
         "group": (None, OR_NONE)},
    ),
}  # fmt: skip


def made(right: Any) -> Any:
    """The right value of a parameter; a `partial` is called to make it."""
    return right() if isinstance(right, partial) else right


def words_of(name: str) -> str:
    """A pattern for the parameter in a message: its name, or its name in words, singular or plural."""
    return rf"\b(process_)?{name.removesuffix('s').replace('_', '[_ ]')}"


def outcome(call: Call, name: str, value: Any) -> str:
    """How the call ends if one parameter has this value.

    "works", or "refuses" if the message of a ValueError names the parameter, or else the text of the error.
    """
    arguments = {other: made(right) for other, (right, _) in call.parameters.items()}
    try:
        call.use(call.function(**{**arguments, name: value}))
    except Exception as error:
        is_named = isinstance(error, ValueError) and re.search(words_of(name), str(error))
        return "refuses" if is_named else f"{type(error).__name__}: {error}"[:150]
    return "works"


def faults(call: Call) -> list[str]:
    """A line for each value that the call should have refused, or taken, and did not."""
    lines = []
    for name, (_, right) in call.parameters.items():
        untested = {label.removesuffix("?") for label in right if label.endswith("?")}
        for label in VALUES.keys() - untested:
            ending = outcome(call, name, VALUES[label])
            if ending != ("works" if label in right else "refuses"):
                lines.append(f"{name}={values.shortly(VALUES[label])}: {ending}")
    return sorted(lines)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that calls read by their names, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("a cat sat on a mat " * 20)
    tokenizer().save("saved")
    data.tokenize_files(tokenizer(), [Path("text")], Path("ids.npy"))
    checkpoint.save_checkpoint(nn.Linear(2, 3), AdamW(parameter()), 3, "saved.pt")
    checkpoint.save(Path("folder"), 3, {})


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_refused_by_its_name(name: str) -> None:
    call = CALLS[name]
    call.use(call.function(**{name: made(right) for name, (right, _) in call.parameters.items()}))
    assert faults(call) == []


def test_every_class_and_function_of_the_api_page_is_tested() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: (lmsys\.(?:model|parallel|tokenizer|training)[.\w]*)\.(\w+)$", text, re.MULTILINE)
    left_out = {"silu", "softmax", "Wrapper", "matrix_groups"}  # Wrapper is the base of strategies that are tested
    public = {name for _, name in named if f"{name}.py" not in os.listdir(ROOT / "lmsys" / "training")}
    assert public - left_out - CALLS.keys() == set()


# Unusual arguments that are right, and must not be refused.


def test_an_embedding_and_a_norm_take_torchs_positional_arguments() -> None:
    assert transformer.Embedding(4, 8, 0).padding_idx == 0
    assert torch.equal(transformer.Embedding(4, 8, 2).weight.any(dim=1), torch.tensor([True, True, False, True]))
    assert transformer.Embedding(4, 8, device="meta").weight.is_meta
    assert transformer.RMSNorm(8, 1e-5, False).weight is None
    assert transformer.RMSNorm(8, 1e-5, True, "meta", torch.bfloat16).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind, sizes", [(transformer.Embedding, (4, 8)), (transformer.RMSNorm, (8,))])
def test_an_embedding_and_a_norm_are_made_without_initialization(kind: Any, sizes: tuple[int, ...]) -> None:
    assert nn.utils.skip_init(kind, *sizes).weight.shape == sizes  # skip_init needs a parameter `device`


class Proxy(nn.Module):
    """Passes on what it does not have itself, as torch's OptimizedModule does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), Proxy])
def test_a_wrapped_model_generates(wrap: Any) -> None:
    model = TransformerLM(CONFIG)
    assert generation.generate(wrap(model), [[1, 2]], 3) == generation.generate(model, [[1, 2]], 3)


def test_a_config_may_be_of_a_derived_class() -> None:
    @dataclass(frozen=True)
    class Larger(ModelConfig):
        remark: str = ""

    @dataclass(frozen=True)
    class Longer(config.TrainConfig):
        pass

    model = Larger(8, 16, 1, 2, vocab_size=300, context_length=16, attention="naive", remark="mine")
    run = RunConfig(model=model, train=Longer())
    assert run.model is model and isinstance(run.changed(["train.lr=1e-2"]).train, Longer)


class Both:
    """Two optimizers with one state dict, which is a list."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[Any]) -> None:
        for each, state in zip(self.optimizers, states, strict=True):
            each.load_state_dict(state)


def test_a_checkpoint_takes_any_object_with_a_state_dict() -> None:
    first, second = (Both(AdamW([nn.Parameter(torch.ones(2))], lr=lr), AdamW([nn.Parameter(torch.ones(3))]))
                     for lr in (0.5, 0.1))  # fmt: skip
    file = io.BytesIO()
    checkpoint.save_checkpoint(nn.Linear(2, 2), first, 3, file)  # type: ignore[arg-type]
    file.seek(0)
    assert checkpoint.load_checkpoint(file, nn.Linear(2, 2), second) == 3  # type: ignore[arg-type]
    assert second.optimizers[0].param_groups[0]["lr"] == 0.5


def test_get_batch_takes_the_number_of_a_device() -> None:
    assert sampling.get_batch(np.arange(50), 2, 4, None)[0].device.type == "cpu"
    if torch.cuda.is_available():
        assert sampling.get_batch(np.arange(50), 2, 4, 0)[0].is_cuda
    else:
        with pytest.raises(RuntimeError, match="accelerator|CUDA"):  # torch's own: the number is taken
            sampling.get_batch(np.arange(50), 2, 4, 0)
