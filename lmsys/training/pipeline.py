"""The steps of `lmsys train`, which make a trained model from text. The command calls `run` on every rank.

The steps tokenizer, tokenize and train leave their results in the run's folder; evaluate and generate print theirs. A
step is a function of a `RunContext` (run_context.py). A new one needs a name in STEPS and its function in FUNCTIONS;
`_run_steps` calls it, on every rank if it is one of WRITERS, else on rank 0.

    OUTPUT/tokenizer/          vocab.json, merges.txt
    OUTPUT/tokens/             train.npy, valid.npy, or a shard of each for every rank that made them
    OUTPUT/checkpoints/        the latest ones
    OUTPUT/log.jsonl           a line for every step and evaluation
    OUTPUT/log.jsonl.replaced  lines of the log that a run which went on from a checkpoint has written anew
    OUTPUT/config.json         the settings of the last start

A made.json in `tokenizer` and one in `tokens` say from which text and settings the folder was made. If these are still
the same, the run skips the step, so that an interrupted run goes on where it was. Only a command for the step
`tokenizer` or `tokenize` alone makes its result anew in any case.
"""

import signal
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from lmsys import checkpointing, doing, files, strict_json, values
from lmsys.model import TransformerLM
from lmsys.parallel import STRATEGIES, collectives
from lmsys.tokenizer import chunks, engines, train
from lmsys.training import checkpoint, corpora, data, evaluation, generation, log, loop, possible
from lmsys.training.config import RunConfig
from lmsys.training.run_context import RunContext

DATA_STEPS = ("tokenizer", "tokenize")  # those that `skip_data` leaves out
WRITERS = (*DATA_STEPS, "train")  # steps that write in the run's folder
STEPS = (*WRITERS, "evaluate", "generate")
# What a run writes in its folder.
FOLDERS, FILES = ("tokenizer", "tokens", "checkpoints"), ("log.jsonl", "log.jsonl.replaced", "config.json")
OF_A_RANK = ("train.threads", "data.processes")  # settings that may differ between ranks


def run(config: RunConfig, steps: tuple[str, ...], skip_data: bool = False) -> int:
    """Runs the steps, and returns the exit code: 0, or 128 + the number of the signal that interrupted training.

    skip_data  True: the steps tokenizer and tokenize are left out, and what they made earlier is taken as it is
    ValueError for settings that cannot work, before anything is made.
    """
    doing.now(doing.AT_FIRST)  # the line that errors show, until a step begins
    world_size, rank = collectives.size_and_rank(None)
    context = RunContext(config, rank, world_size, anew=len(steps) == 1)  # one step was asked for alone
    _agree(config, steps, skip_data)
    config.train.accumulation(world_size)  # a ValueError comes here, not after the data has been made
    STRATEGIES.select([config.train.strategy])  # ValueError for a strategy that is not known
    if "train" in steps:
        possible.plan(config, context.device)
        if "tokenize" in steps and not skip_data and Path(config.data.corpus).is_file():
            possible.check_text(config, corpora.corpus_of(config.data))
    if context.device.type == "cpu" and config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    with ExitStack() as ending:
        if set(WRITERS) & set(steps):
            _check_folder(config.folder)
            if rank == 0:
                ending.callback(files.claim(config.folder / "log.jsonl"))  # one run at a time writes in the output
        return _run_steps(context, [step for step in steps if not (skip_data and step in DATA_STEPS)])


def _check_folder(folder: Path) -> None:
    """ValueError where a file is in the place of a folder that a run writes, or a folder in that of a file."""
    corpora.make_folder(folder, "output")
    values.hold(
        *(
            (path.is_dir() or not path.exists(), f"{path}: must be a folder; move away what stands there")
            for path in map(folder.joinpath, FOLDERS)
        ),
        *((not path.is_dir(), f"{path}: must be a file; move the folder away") for path in map(folder.joinpath, FILES)),
    )


def _run_steps(context: RunContext, steps: list[str]) -> int:
    """Runs the steps in order, each when all ranks have done the one before it, and returns the exit code."""
    if "train" in steps and (saved := checkpoint.newest(context.checkpoints, verified=False)) is not None:
        saved.require(**loop.facts_of(context.config))  # here, before other data replace those of that training
    for step in steps:
        if "generate" in steps and step != "tokenizer":
            _ = context.prompt  # too long a prompt is refused here, not after the training
        doing.now(f"in {step!r}")
        # The steps that are no WRITERS print, which rank 0 does alone.
        if (context.rank == 0 or step in WRITERS) and (code := FUNCTIONS[step](context)):
            return code
        context.wait()
    return 0


def _agree(config: RunConfig, steps: tuple[str, ...], skip_data: bool) -> None:
    """ValueError on every rank that names the first setting of which ranks have different values."""
    settings = {name: attrgetter(name)(config) for name in strict_json.paths(config)}
    settings |= {"the step": " ".join(steps), "--skip-data": skip_data}
    first, *rest = collectives.gather_objects(settings, None)
    values.hold(
        *(
            (
                name in OF_A_RANK or other[name] == value,
                f"ranks have different settings: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank};"
                " start all with the same command",
            )
            for rank, other in enumerate(rest, start=1)
            for name, value in first.items()
        )
    )


def make_tokenizer(context: RunContext) -> None:
    """Rank 0 trains a tokenizer on the training text, unless settings name one."""
    if context.config.data.tokenizer is not None or context.rank != 0:
        return
    corpus, vocab_size = context.corpus(), context.config.model.vocab_size
    wanted = {"vocab_size": vocab_size, "text": _parts_of_text(corpus.train)}
    record = context.config.folder / "tokenizer" / "made.json"
    if context.anew or _read_made(record) != wanted:
        context.say(
            f"training a tokenizer of {vocab_size:,} tokens on {sum(file.size for file in corpus.train) / 1e6:,.1f} MB"
        )
        tokenizer = train(corpus.train, vocab_size, [corpora.END_OF_TEXT], processes=context.processes)
        saved = None if context.anew else checkpoint.newest(context.checkpoints, verified=False)
        values.hold(
            (
                saved is None or saved.facts.get("tokenizer") == tokenizer.fingerprint,
                f"{context.config.folder}: holds a training on other text: name another --output for this",
            )
        )
        record.unlink(missing_ok=True)  # a save that is killed half-way must not count as made
        tokenizer.save(record.parent)
        files.write_json(record, wanted)


def make_tokens(context: RunContext) -> None:
    """Each rank tokenizes its share of the text."""
    if context.rank == 0:
        context.corpus()  # one rank makes or downloads it
    context.wait()
    corpus, tokenizer, folder = context.corpus(), context.tokenizer, context.config.folder / "tokens"
    mine = {
        "tokenizer": tokenizer.fingerprint,
        "text": [_parts_of_text(corpus.train), _parts_of_text(corpus.valid)],
        **_text_settings(context.config),
    }
    # What rank 0 finds counts for all: ranks on other machines may have copies of the text, with other paths and times.
    (wanted, before), *_ = collectives.gather_objects((mine, _read_made(folder / "made.json")), None)
    if not context.anew:
        if before | wanted == before:  # every entry of `wanted` is in `before`, which has one more, "shards"
            return
        possible.check_text(context.config, corpus, tokenizer)
    engine = engines.choose(
        context.config.data.engine, tokenizer, corpus.files, threads=context.processes, say=context.say
    )
    by = f" by {engine.name}" if engine else ""
    others = [
        f"{name}={before[name]!r}"
        for name, text in _text_settings(context.config).items()
        if before.get(name, text) != text
    ]
    instead = (
        f", in place of the tokens of {', '.join(others)}, also for a training that goes on here" if others else ""
    )
    context.say(f"tokenizing {sum(file.size for file in corpus.files) / 1e6:,.1f} MB{by}{instead}")
    if context.rank == 0:
        (folder / "made.json").unlink(missing_ok=True)
    context.wait()  # it is gone before any shard is written over
    for part, texts in (("train", corpus.train), ("valid", corpus.valid)):
        data.tokenize_files(
            tokenizer, texts, folder / f"{part}.npy",
            processes=context.processes, engine=engine, rank=context.rank, world_size=context.world_size,
        )  # fmt: skip
    context.wait()
    if context.rank == 0:
        files.write_json(folder / "made.json", {**wanted, "shards": context.world_size})


def train_model(context: RunContext) -> int:
    """Trains to the end, from the newest checkpoint if there is one. Returns the exit code."""
    config, (source, windows) = context.config, _data(context)
    # Rank 0 alone looks for the newest checkpoint, as it reads all files of one to verify it.
    saved, *_ = collectives.gather_objects(checkpoint.newest(context.checkpoints) if context.rank == 0 else None, None)
    trainer = loop.Trainer(
        config, source, windows, context.device, saved=saved, facts={"tokenizer": context.tokenizer.fingerprint}
    )
    if saved is not None:
        done = "; all steps are done: name another --output to train anew" if trainer.step >= config.train.steps else ""
        context.say(f"going on from {saved.manifest}, step {trainer.step:,}{done}")
        # The learning rate jumps where a run goes on with another number of steps.
        changed = [
            f"{name.removeprefix('schedule.')} was {values.shortly(was)} and is {now}"
            for name, was, now in saved.differences(schedule=trainer.schedule)
        ]
        if changed and not done:
            context.say(f"the learning rate has another schedule than before: {', '.join(changed)}")
    # With several ranks the strategy may leave each of them only a part of the parameters: then none are counted.
    size = f"{sum(x.numel() for x in trainer.model.parameters()):,} parameters, " if context.world_size == 1 else ""
    context.say(f"training: {size}{len(source):,} tokens of text, {context.world_size} x {context.device.type}")
    if config.model.checkpoint_blocks == checkpointing.FIT:
        context.say(f"model.checkpoint_blocks=fit is {trainer.model.config.checkpoint_blocks} here")
    if context.rank == 0:
        files.write_json(config.folder / "config.json", asdict(config))
    with (
        closing(log.JsonLines(config.folder / "log.jsonl", trainer.step))
        if context.rank == 0
        else nullcontext() as lines
    ):
        why, valid = trainer.fit(context.checkpoints, lines, context.say)
    if why.startswith("SIG"):  # the name of a signal
        context.say(f"interrupted by {why}; saved at step {trainer.step:,}: the same command goes on from there")
        return 128 + signal.Signals[why]
    if why == "time" and valid is not None:
        tokens = trainer.step * config.train.batch_size * config.model.context_length
        mfu = trainer.progress().mfu(", ", trainer.seconds / trainer.step)
        context.say(
            f"speedrun: {tokens:,} tokens in {trainer.seconds:.1f} s of steps{mfu}, validation loss {valid.loss:.4f}"
        )
    return 0


def evaluate_model(context: RunContext) -> None:
    """Prints the loss on the held-out windows of the newest checkpoint and of a unigram model. Rank 0 calls it."""
    config, (source, windows), (model, step) = context.config, _data(context), _trained(context)
    valid = evaluation.evaluate(model, windows, config.evaluate.batch_size, context.autocast)
    least = evaluation.unigram(source, windows, config.model.vocab_size)
    context.say(
        f"step {step:,} on {valid.tokens:,} held-out tokens: loss {valid.loss:.4f}, perplexity"
        f" {valid.perplexity:,.1f}; a unigram model: loss {least.loss:.4f}, perplexity {least.perplexity:,.1f}"
    )


def print_sample(context: RunContext) -> None:
    """Prints how the newest checkpoint continues the prompt. Rank 0 calls it."""
    config, tokenizer, prompt = context.config.generate, context.tokenizer, context.prompt
    model, step = _trained(context)
    with context.autocast():
        (new_tokens,) = generation.generate(
            model, [prompt], min(config.max_new_tokens, model.config.context_length - len(prompt)),
            generation.Sampling(config.temperature, config.top_k, config.top_p),
            stop=data.end_of_text(tokenizer), seed=config.seed, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
    context.say(f"sample of step {step:,}:\n{tokenizer.decode(prompt + new_tokens)}")


def _trained(context: RunContext) -> tuple[TransformerLM, int]:
    """(the model of the newest checkpoint, its step). ValueError where there is none, or it is of another run."""
    if (saved := checkpoint.newest(context.checkpoints)) is None:
        raise ValueError(f"{context.checkpoints}: there is no checkpoint; train first")
    saved.require(model=loop.facts_of(context.config)["model"], tokenizer=context.tokenizer.fingerprint)
    model = TransformerLM(context.config.model, device=context.device)
    model.load_state_dict(saved.shared("model")["model"])
    return model, saved.step


def _data(context: RunContext) -> tuple[data.TokenFiles, evaluation.Windows]:
    """(the tokens to train on, the windows to evaluate on). ValueError where they have not been made."""
    folder, config, tokenizer = context.config.folder / "tokens", context.config, context.tokenizer
    made = _read_made(folder / "made.json")
    values.hold((made, f"{folder}: there are no tokens; make them by the step `tokenize`, without --skip-data"))
    for name, text in _text_settings(config).items():
        if (was := made.get(name, text)) != text:  # files of earlier versions have no names
            context.say(
                f"{folder}: has the tokens of {name}={was!r}, not of {text!r}; the step `tokenize` makes them anew"
            )
    source, valid = (
        data.TokenFiles(data.shards(folder / f"{part}.npy", made["shards"]), tokenizer) for part in ("train", "valid")
    )
    return source, data.fixed_windows(
        valid, config.model.context_length, config.evaluate.windows,
        end_of_text=valid.end_of_text if config.data.packing == "documents" else None,
    )  # fmt: skip


def _parts_of_text(text: tuple[chunks.Chunk, ...]) -> list[Any]:
    """The entry of a text in made.json: [path, start, stop, when the file was last changed] of each part."""
    return [[str(chunk.path), chunk.start, chunk.stop, chunk.path.stat().st_mtime_ns] for chunk in text]


def _text_settings(config: RunConfig) -> dict[str, str | None]:
    """The settings, by name, that say which text becomes tokens. made.json has them, too."""
    return {"data.corpus": config.data.corpus, "data.valid": config.data.valid}


def _read_made(path: Path) -> dict[str, Any]:
    """The content of a made.json, which a step writes last; {} where the step has not come to its end."""
    try:
        return strict_json.read_json(path, text=list)  # both have a list `text`; other content is no made.json
    except ValueError:
        return {}


FUNCTIONS: dict[str, Callable[[RunContext], int | None]] = dict(
    zip(STEPS, (make_tokenizer, make_tokens, train_model, evaluate_model, print_sample), strict=True)
)
