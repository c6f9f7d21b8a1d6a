"""Every setting of a training run, as frozen, checked dataclasses that convert to JSON and back. Imports no torch.

`lmsys train` reads a `RunConfig` from --config and --set. A new setting is a field here and a line in its class's
docstring; the code that acts on it is in pipeline.py or loop.py, or in a module that they call. The command line, the
JSON and the checks of types follow from its annotation. For a field of `Annotated[type, rule]`, the base class calls
rule(name, value) when a config is made; rules that compare fields are in `__post_init__`. Checks that need torch are
elsewhere: possible.py looks the strategy up in its table and compares settings with its traits (facts about the
strategy that `lmsys.traits` lists), and run_context.py checks the name of the device.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from lmsys import config, strict_json, values

MATMUL_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # what matmuls read, by precision
ENGINES = ("own", "auto", "gigatoken", "fastokens", "tiktoken", "tokenizers")  # see `lmsys.tokenizer.engines`
MATRIX_SCALES = ("original", "match_rms_adamw")  # of `lmsys.training.muon.Muon`: its adjust_lr_fn
# The beginning of the URLs of the corpus TinyStories.
TINYSTORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-"


def _path(name: str, text: str) -> None:
    values.hold(
        (text and "\0" not in text, f"{name}={values.shortly(text)} must be a path: not empty, and without a null byte")
    )


def _sha256(name: str, text: str) -> None:
    values.hold((re.fullmatch("[0-9a-fA-F]{64}", text), f"{name}={text!r} must be 64 hexadecimal digits, or null"))


def _url_of_a_file(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{name}={url!r} is no address: {error}") from error
    is_file = parts.scheme in ("http", "https") and parts.netloc and file_of(url) not in ("", ".", "..")
    values.hold((is_file, f"{name}={url!r} must begin with http:// or https:// and end in a file's name"))


# A rate above 1e9 is a mistake: divided by AdamW's 1 - β1, a much larger one would be beyond float32.
Rate = Annotated[float, partial(values.finite, least=0, most=10**9)]
PathText = Annotated[str, _path]
Sha256 = Annotated[str, _sha256]


@dataclass(frozen=True)
class DataConfig(strict_json.Checked):
    """The text, and how it becomes tokens.

    corpus        stdlib, tinystories, or the path of a text file
    valid         a text file to evaluate on; None: the part of the corpus that is not trained on
    folder        where corpora are kept; None: `corpora` in $LMSYS_CACHE_DIR
    url           where tinystories is downloaded from; valid_url: the part to evaluate on. A file is kept under the
                  name that its URL ends in
    sha256        expected SHA-256 of the file at `url` (valid_sha256: at `valid_url`); None: any file is taken
    tokenizer     the folder of a tokenizer; None: one of model.vocab_size tokens is trained on the corpus
    processes     number of processes that tokenize on each rank; with an engine other than own, of its threads. None: a
                  rank's share of the cores
    engine        the code that encodes the text, by the same tokenizer: own, this library; auto, a faster package, if
                  one is installed and gives our ids on a sample of the text; or a package by its name: gigatoken,
                  fastokens, tiktoken, tokenizers
    packing       none: a sequence is running text, in which a token attends to all tokens before it, also those of
                  other documents; documents: a token attends to its own document alone
    """

    corpus: PathText = "stdlib"
    valid: PathText | None = None
    folder: PathText | None = None
    url: Annotated[str, _url_of_a_file] = TINYSTORIES + "train.txt"
    sha256: Sha256 | None = None
    valid_url: Annotated[str, _url_of_a_file] = TINYSTORIES + "valid.txt"
    valid_sha256: Sha256 | None = None
    tokenizer: PathText | None = None
    processes: values.Count | None = None
    engine: Annotated[str, partial(values.one_of, known=ENGINES)] = "own"
    packing: Annotated[str, partial(values.one_of, known=("none", "documents"))] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        values.hold(
            (
                file_of(self.url) != file_of(self.valid_url),
                f"url={self.url!r} and valid_url={self.valid_url!r} must end in different names",
            )
        )


@dataclass(frozen=True)
class TrainConfig(strict_json.Checked):
    """How the model is trained.

    steps             training steps: updates of the weights
    batch_size        sequences of a step, over all ranks and micro-batches; the loss curve does not depend on the
                      number of ranks among which they are divided
    micro_batch_size  sequences of one forward on a rank; a rank with more sequences in a step accumulates gradients
    reproducible      train to the same weights, bit for bit, on any number of ranks that `leaves` allows and under any
                      strategy whose trait `why_not_reproducible` is empty
    leaves            parts that the batch is divided into if `reproducible`, in place of micro-batches: a power of two,
                      as their gradients are added in pairs. The training then runs on 1, leaves / 2 or leaves ranks
    optimizer         adamw, or muon: Muon steps the matrices of the blocks, AdamW all else
    lr, min_lr        the largest and the last learning rate of the cosine schedule
    matrix_lr         the largest learning rate of Muon's matrices, which rises and falls as lr does
    momentum          Muon's momentum, below 1
    adjust_lr_fn      what Muon multiplies the rate of a matrix of R rows and C columns by: original, √max(1, R / C); or
                      match_rms_adamw, 0.2 √max(R, C), where matrix_lr is to be chosen as for AdamW
    warmup_steps      steps from a rate of 0 to lr; None: 20, or half of the steps where these are fewer than 40
    betas, eps        AdamW's: the decay rates of its two moments, and what is added to the denominator, above 0: the
                      weights of tokens that have not come yet have gradients of 0, and 0 / 0 would be NaN
    weight_decay      a step also multiplies each weight by 1 - weight_decay x learning rate
    undecayed         parameters without weight decay: parts of their names, divided by |, such as ln|embeddings; None:
                      all decay
    clip_norm         the norm that gradients are clipped to; 0: they are not clipped
    seed              seed of the initial weights and of the order of the batches
    precision         fp32; or bf16 or fp16 by autocast, fp16 with loss scaling as of torch.amp.GradScaler
    compile           compile the blocks by torch.compile: each alone, or, if the strategy is the row `none` and
                      reproducible is false, several in one graph
    fused             run the blocks by the kernels of lmsys.model.fused, without a compiler, on CUDA; best with graph;
                      not with activation checkpointing, nor with strategies that state `why_not_fused`, such as fsdp
    graph             replay forward, backward and synchronization as one CUDA graph, so that no kernel waits for the
                      host to launch it; not with packed documents, nor with strategies that divide parameters among
                      ranks between steps
    strategy          a row of `lmsys.parallel.STRATEGIES`, or path.py:Class
    bucket_mb         MiB of a bucket, for strategies that have buckets; None: the strategy's own choice
    sharded_optimizer divide the optimizer's state among ranks, with a strategy that all-reduces gradients
    device            cpu or cuda; None: cuda where there is one
    memory_gib        memory of a rank in GiB, for model.checkpoint_blocks=fit; None: 90 % of its GPU's
    threads           CPU threads of a rank; with a small model, threads wait for each other; None: torch's default
    max_nonfinite     how many steps in a row may be skipped because their loss or gradient is not finite; one more
                      ends the run. Under fp16 a finite loss with an infinite gradient, which a smaller loss scale may
                      mend, sets the count back to 0
    max_seconds       seconds of wall time after which the run ends, from its start or resume; None: all steps are done
    log_interval      steps between two printed lines on progress
    """

    steps: values.Count = 400
    batch_size: values.Count = 16
    micro_batch_size: values.Count = 8
    reproducible: bool = False
    leaves: values.Count = 4
    optimizer: Annotated[str, partial(values.one_of, known=("adamw", "muon"))] = "adamw"
    lr: Rate = 3e-3
    min_lr: Rate = 3e-4
    matrix_lr: Rate = 0.02
    momentum: values.Amount = 0.95
    adjust_lr_fn: Annotated[str, partial(values.one_of, known=MATRIX_SCALES)] = "original"
    warmup_steps: values.Natural | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: values.Positive = 1e-8
    weight_decay: values.Amount = 0.1
    undecayed: str | None = None
    clip_norm: values.Amount = 1.0
    seed: values.Seed = 0
    precision: Annotated[str, partial(values.one_of, known=MATMUL_DTYPES)] = "fp32"
    compile: bool = False
    fused: bool = False
    graph: bool = False
    strategy: str = "bucketed"
    bucket_mb: values.Positive | None = None
    sharded_optimizer: bool = False
    device: str | None = None
    memory_gib: values.Positive | None = None
    threads: values.Count | None = 1
    max_nonfinite: values.Natural = 10
    max_seconds: values.Positive | None = None
    log_interval: values.Count = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        values.hold(
            (self.min_lr <= self.lr, f"min_lr={self.min_lr} must be at most lr={self.lr}"),
            (self.warmup < self.steps, f"warmup_steps={self.warmup} must be less than steps={self.steps}"),
            (all(0 <= beta < 1 for beta in self.betas), f"betas={self.betas} must be two numbers in [0, 1)"),
            (self.momentum < 1, f"momentum={self.momentum} must be less than 1"),
            (
                self.lr > 0 or self.optimizer == "adamw",
                "lr=0 with optimizer=muon: it must be above 0, as matrix_lr rises and falls as lr does",
            ),
            (
                not (self.compile and self.fused),
                "compile=true and fused=true are two ways to run the blocks: one of them must be false",
            ),
            (self.leaves.bit_count() == 1, f"leaves={self.leaves} must be a power of two: they are added in pairs"),
            (
                not self.reproducible or self.batch_size % self.leaves == 0,
                f"batch_size={self.batch_size} must be a multiple of leaves={self.leaves}",
            ),
        )

    @property
    def warmup(self) -> int:
        """The number of steps in which the learning rate rises from 0 to lr."""
        return min(20, self.steps // 2) if self.warmup_steps is None else self.warmup_steps

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a rank's forward: a leaf if `reproducible`, else a micro-batch."""
        return self.batch_size // self.leaves if self.reproducible else self.micro_batch_size

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of a rank in a step. ValueError where the batch cannot be divided evenly among ranks."""
        if self.reproducible:
            fit = sorted({1, max(1, self.leaves // 2), self.leaves})
            values.hold(
                (
                    world_size in fit,
                    f"train.reproducible with train.leaves={self.leaves} runs on {', '.join(map(str, fit))} ranks, not"
                    f" {world_size}",
                )
            )
            return self.leaves // world_size
        count, left = divmod(self.batch_size, self.micro_batch_size * world_size)
        values.hold(
            (
                count and not left,
                f"train.batch_size={self.batch_size} must be a multiple of train.micro_batch_size"
                f"={self.micro_batch_size} x {world_size} ranks",
            )
        )
        return count


@dataclass(frozen=True)
class EvaluateConfig(strict_json.Checked):
    """How the model is evaluated on held-out text.

    interval    steps between evaluations; <= 0: only at the end
    windows     sequences of the held-out text, the same ones each time
    batch_size  sequences of a forward
    """

    interval: int = 100
    windows: values.Count = 64
    batch_size: values.Count = 16


@dataclass(frozen=True)
class CheckpointConfig(strict_json.Checked):
    """How often the state is saved, so that an interrupted run can go on.

    interval  steps between two checkpoints; <= 0: only at the end, which always has one. Other steps have none if they
              were skipped because their loss or gradient was not finite
    keep      how many of the latest checkpoints stay; None: all
    """

    interval: int = 100
    keep: values.Count | None = 2


@dataclass(frozen=True)
class GenerateConfig(strict_json.Checked):
    """The sample of text that a run prints.

    prompt          the text that the sample continues
    max_new_tokens  tokens of the sample, at most
    temperature, top_k, top_p  as in `lmsys.training.generation.Sampling`
    seed            seed by which tokens are sampled
    """

    prompt: str = "def "
    max_new_tokens: values.Natural = 100
    temperature: values.Amount = 0.8
    top_k: values.Count | None = None
    top_p: values.Share = 0.95
    seed: values.Seed = 0


@dataclass(frozen=True)
class RunConfig(strict_json.Checked):
    """All settings of a run.

    output      the run's folder, for tokenizer, tokens, checkpoints and log
    data        a section of settings, as are those that follow: `DataConfig`
    model       `lmsys.config.ModelConfig`
    train       `TrainConfig`
    evaluate    `EvaluateConfig`
    checkpoint  `CheckpointConfig`
    generate    `GenerateConfig`

    Trust a config as you trust code: its strategy may be a file of Python that is run, and its folders are written to.
    """

    output: PathText = "out/training"
    data: DataConfig = field(default_factory=DataConfig)
    model: config.ModelConfig = field(
        default_factory=lambda: config.model_config("tiny", vocab_size=4096, context_length=128)
    )
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that JSON text describes; settings that it lacks have their defaults.

        ValueError with the JSON path of what is wrong.
        """
        return strict_json.overlay(cls(), strict_json.parse_json(text))

    def changed(self, settings: list[str]) -> "RunConfig":
        """A copy with other settings, given as on the command line: "train.lr=3e-4". The last value of a setting holds.

        ValueError for an unknown setting or a wrong value.
        """
        merged: dict[str, object] = {}
        for setting in values.several("settings", settings, str):
            merged = _merged(merged, strict_json.parse_setting(self, setting))
        return strict_json.overlay(self, merged)

    @property
    def folder(self) -> Path:
        return Path(self.output)


def file_of(url: str) -> str:
    """The name of the file that a URL ends in; "" where it ends in a slash."""
    return urlsplit(url).path.rpartition("/")[2]


def _merged(value: Any, more: Any) -> Any:
    """Merges two nested dicts; where both have a setting, that of `more` holds. Returns `more` if one is no dict."""
    if not (isinstance(value, dict) and isinstance(more, dict)):
        return more
    return value | {key: _merged(value.get(key), x) for key, x in more.items()}
