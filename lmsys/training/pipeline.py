"""From text to a trained model, in steps that each leave their result in the run's folder. Runs on every rank.

    OUTPUT/tokenizer/      vocab.json, merges.txt
    OUTPUT/tokens/         train.npy, valid.npy, or a shard of each for every rank that made them; made.json
    OUTPUT/checkpoints/    the latest ones
    OUTPUT/log.jsonl       a line for every step and evaluation; config.json: the settings of the last start

A result that is there and was made of the same settings is taken as it is, so an interrupted run goes on where it was.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmsys.cost.operations import model_flops
from lmsys.measure.machine import peak_flops_per_s
from lmsys.model import TransformerLM
from lmsys.parallel import group
from lmsys.parallel.collectives import gather_objects, size_and_rank
from lmsys.tokenizer import Tokenizer, train
from lmsys.tokenizer.chunks import Chunk
from lmsys.training import checkpoint
from lmsys.training.checkpoint import Checkpoint
from lmsys.training.config import RunConfig
from lmsys.training.corpora import END_OF_TEXT, Corpus, corpus_of
from lmsys.training.data import TokenFiles, fixed_windows
from lmsys.training.evaluation import evaluate, unigram
from lmsys.training.generation import Sampling, generate
from lmsys.training.log import JsonLines, others
from lmsys.training.loop import Outcome, Trainer
from lmsys.training.tokens import shards, tokenize_files

STEPS = ("tokenizer", "tokenize", "train", "evaluate", "generate")
PARTS = ("train", "valid")
DOWNLOAD_LINES_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a step runs."""

    config: RunConfig
    rank: int
    world_size: int

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def processes(self) -> int:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return self.config.data.processes or max(1, len(os.sched_getaffinity(0)) // local)

    @property
    def device(self) -> torch.device:
        if dist.is_initialized():
            return group.device()
        name = self.config.train.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in ("cpu", "cuda") or name == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"train.device={name!r} must be cpu, or cuda where there is a CUDA device")
        return torch.device(name)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def run(config: RunConfig, steps: tuple[str, ...], skip_data: bool = False) -> int:
    """The exit code: 0, or 128 + the number of the signal that training was interrupted by."""
    world_size, rank = size_and_rank(None)
    place = Place(config, rank, world_size)
    config.train.accumulation(world_size)  # refused here rather than after the data has been made
    if place.device.type == "cpu" and config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    skipped = ("tokenizer", "tokenize") if skip_data else ()
    alone = len(steps) == 1
    for step in steps:
        if step in skipped:
            continue
        if step == "tokenizer":
            make_tokenizer(place, anew=alone)
        elif step == "tokenize":
            make_tokens(place, anew=alone)
        elif step == "train":
            outcome = train_model(place)
            if outcome.why.startswith("SIG"):
                return 128 + signal.Signals[outcome.why]
        elif rank == 0:
            (evaluate_model if step == "evaluate" else print_sample)(place)
    _wait(place)
    return 0


def make_tokenizer(place: Place, anew: bool) -> None:
    """Trained by rank 0 on the training text, unless a folder of one is given."""
    if place.config.data.tokenizer is not None or place.rank != 0:
        return _wait(place)
    corpus, vocab_size = _corpus(place), place.config.model.vocab_size
    made = {"vocab_size": vocab_size, "text": _facts(corpus.train)}
    if anew or _read(place.folder / "tokenizer" / "made.json") != made:
        place.say(f"training a tokenizer of {vocab_size:,} tokens on {_size(corpus.train) / 1e6:,.1f} MB")
        tokenizer = train(corpus.train, vocab_size, [END_OF_TEXT], place.processes)
        tokenizer.save(place.folder / "tokenizer")
        _write(place.folder / "tokenizer" / "made.json", made)
    _wait(place)


def make_tokens(place: Place, anew: bool) -> None:
    """Each rank tokenizes its share of the text."""
    if place.rank == 0:
        _corpus(place)  # made or downloaded by one
    _wait(place)
    corpus, tokenizer, folder = _corpus(place), _tokenizer(place), place.folder / "tokens"
    made = {"tokenizer": tokenizer.fingerprint, "text": [_facts(corpus.train), _facts(corpus.valid)]}
    found = _read(folder / "made.json") or {}
    if not anew and {name: found.get(name) for name in made} == made:
        return
    place.say(f"tokenizing {_size(corpus.files) / 1e6:,.1f} MB")
    _wait(place)  # all have read made.json
    for part, files in zip(PARTS, (corpus.train, corpus.valid), strict=True):
        tokenize_files(
            tokenizer, files, folder / f"{part}.npy",
            processes=place.processes, rank=place.rank, world_size=place.world_size,
        )  # fmt: skip
    _wait(place)
    if place.rank == 0:
        _write(folder / "made.json", {**made, "shards": place.world_size})
    _wait(place)


def train_model(place: Place) -> Outcome:
    """From the newest whole checkpoint, where there is one."""
    config, tokenizer = place.config, _tokenizer(place)
    source, valid = (_tokens(place, part, tokenizer) for part in PARTS)
    windows = fixed_windows(valid, config.model.context_length, config.evaluate.windows)
    found = _newest(place)
    trainer = Trainer(config, source, windows, place.device, found, {"tokenizer": tokenizer.fingerprint})
    if trainer.step:
        place.say(f"going on from {found.manifest}, step {trainer.step:,}" if found else "")
    parameters = sum(x.numel() for x in trainer.model.parameters()) if place.world_size == 1 else None
    size = f"{parameters:,} parameters, " if parameters else ""
    place.say(f"training: {size}{len(source):,} tokens of text, {place.world_size} x {place.device.type}")
    log = None
    if place.rank == 0:
        place.folder.mkdir(parents=True, exist_ok=True)
        (place.folder / "config.json").write_text(config.to_json())
        log = JsonLines(place.folder / "log.jsonl", trainer.step, others(config, trainer.step))
    try:
        outcome = trainer.fit(place.checkpoints, log, place.say)
    finally:
        if log is not None:
            log.close()
    _tell_outcome(place, outcome)
    return outcome


def evaluate_model(place: Place) -> None:
    """The newest checkpoint's loss on the fixed windows, and that of a model that knows frequencies alone."""
    config, tokenizer = place.config, _tokenizer(place)
    source, valid = (_tokens(place, part, tokenizer) for part in PARTS)
    windows = fixed_windows(valid, config.model.context_length, config.evaluate.windows)
    model, step = _trained(place, tokenizer)
    found = evaluate(model, windows, config.evaluate.batch_size)
    least = unigram(source, windows, config.model.vocab_size)
    place.say(
        f"step {step:,} on {found.tokens:,} held-out tokens: loss {found.loss:.4f}, perplexity"
        f" {found.perplexity:,.1f}; a unigram model: loss {least.loss:.4f}, perplexity {least.perplexity:,.1f}"
    )


def print_sample(place: Place) -> None:
    """What the newest checkpoint makes of the prompt."""
    config, tokenizer = place.config.generate, _tokenizer(place)
    model, step = _trained(place, tokenizer)
    stop = tokenizer.encode(END_OF_TEXT)
    prompt = tokenizer.encode(config.prompt) or stop
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    room = min(config.max_new_tokens, model.config.context_length - len(prompt))
    if room < 0:
        raise ValueError(f"generate.prompt is {len(prompt)} tokens, more than {model.config.context_length=}")
    (made,) = generate(model, [prompt], room, sampling, stop=stop[0] if len(stop) == 1 else None, seed=config.seed)
    place.say(f"sample of step {step:,}:\n{tokenizer.decode(prompt + made)}")


def _tell_outcome(place: Place, outcome: Outcome) -> None:
    config = place.config
    if outcome.why.startswith("SIG"):
        place.say(f"interrupted by {outcome.why}; saved at step {outcome.step:,}: the same command goes on from there")
    elif outcome.why == "time" and outcome.valid is not None:
        tokens = outcome.step * config.train.batch_size * config.model.context_length
        flops = model_flops(config.model, tokens=tokens, context=config.model.context_length, mode="step")
        gpu = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
        peak = peak_flops_per_s(gpu, config.train.precision, place.world_size)
        mfu = "" if peak is None else f", MFU {100 * flops / outcome.seconds / peak:.1f} %"
        place.say(
            f"speedrun: {tokens:,} tokens in {outcome.seconds:.1f} s{mfu}, validation loss {outcome.valid.loss:.4f}"
        )


def _trained(place: Place, tokenizer: Tokenizer) -> tuple[TransformerLM, int]:
    found = checkpoint.newest(place.checkpoints)
    if found is None:
        raise ValueError(f"{place.checkpoints}: there is no checkpoint; train first")
    found.require(tokenizer=tokenizer.fingerprint)
    model = TransformerLM(place.config.model, device=place.device)
    model.load_state_dict(found.shared()["model"])
    return model, found.step


def _newest(place: Place) -> Checkpoint | None:
    """Looked for by rank 0: finding it reads every file."""
    found = checkpoint.newest(place.checkpoints) if place.rank == 0 else None
    (manifest, *_) = gather_objects(found and found.manifest, None)
    return found if place.rank == 0 or manifest is None else checkpoint.read(manifest)


def _corpus(place: Place) -> Corpus:
    told = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= DOWNLOAD_LINES_S or done == total:
            told = time.monotonic()
            place.say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    return corpus_of(place.config.data, tell)


def _tokenizer(place: Place) -> Tokenizer:
    folder = Path(place.config.data.tokenizer or place.folder / "tokenizer")
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no tokenizer; make one by the step `tokenizer`, without --skip-data")
    tokenizer = Tokenizer.load(folder, [END_OF_TEXT] if place.config.data.tokenizer else [])
    if tokenizer.vocab_size > (vocab_size := place.config.model.vocab_size):
        raise ValueError(f"{folder}: has {tokenizer.vocab_size:,} tokens, more than model.vocab_size={vocab_size:,}")
    return tokenizer


def _tokens(place: Place, part: str, tokenizer: Tokenizer) -> TokenFiles:
    folder = place.folder / "tokens"
    made = _read(folder / "made.json")
    if made is None:
        raise ValueError(f"{folder}: there are no tokens; make them by the step `tokenize`, without --skip-data")
    return TokenFiles(shards(folder / f"{part}.npy", made["shards"]), tokenizer)


def _facts(files: tuple[Chunk, ...]) -> list[Any]:
    return [[str(chunk.path), chunk.start, chunk.stop] for chunk in files]


def _size(files: tuple[Chunk, ...]) -> int:
    return sum(chunk.size for chunk in files)


def _read(path: Path) -> dict[str, Any] | None:
    """What a step has written last, or None where it has not come to its end."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=1))


def _wait(place: Place) -> None:
    if place.world_size > 1:
        dist.barrier()
