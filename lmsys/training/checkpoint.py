"""Saves and loads checkpoints: files of tensors, and a manifest that names these files with their checksums.

A checkpoint of step 100 on two ranks is `step-00000100.json`, the manifest, and beside it a file of what all ranks
share and one for each rank's own part, under names that no earlier save has used. The manifest is renamed into place
last, when all that it names is on the disk, so a save that is killed at any moment leaves the earlier checkpoints as
they were. All ranks write to one folder. Loading unpickles tensors and plain values only (`weights_only`).

The training loop (loop.py) calls `save`. The steps of `lmsys train` (pipeline.py) call `newest`, which returns a
`Checkpoint`. loop.py and training_state.py decide what the files hold: to save more, change these two. To change the
manifest, see _FORMAT. For a loop of your own, `save_checkpoint` and `load_checkpoint` write and read a single file,
without checksums.
"""

import io
import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import torch

from lmsys import files, strict_json, values

State = dict[str, Any]  # tensors, numbers, strings, and dicts, lists and tuples of them
_MANIFEST = re.compile(r"step-(\d{8,})\.json")  # a manifest's name, with its step
# Matches the names of all files that a save writes except finished manifests. So it matches those of parts, unfinished
# parts and unfinished manifests. The first group is the step.
_WRITTEN = re.compile(
    r"step-(\d{8,})(-(shared|rank-\d+)-[0-9a-f]{8}\.pt(\.[0-9a-f]{8}\.tmp)?|\.json\.[0-9a-f]{8}\.tmp)"
)
# The format of manifests. Raise it when older versions could not read a new manifest. `read` refuses all other formats,
# also earlier ones: if those must still be loaded, change `read`, too.
_FORMAT = 1


class SaveError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint, as its manifest describes it.

    manifest    the path of the manifest
    world_size  the number of ranks that saved it
    facts       the `facts` that `save` was given, such as the model's config
    files       for each part, "shared", "rank-0" and so on, its "file" (a name), "bytes" and "sha256"
    """

    manifest: Path
    step: int
    world_size: int
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    def shared(self, *keys: str) -> State:
        """The state that all ranks have in common, on the CPU.

        ValueError when its file is not as it was saved, holds no state, or lacks one of `keys`.
        """
        return load_state(self._verified("shared"), *keys)

    def own(self, rank: int, *keys: str) -> State:
        """The part that rank `rank` saved. At another world size read the parts of all ranks. Errors as in `shared`."""
        values.hold(
            (0 <= rank < self.world_size, f"{self.manifest}: saved by {self.world_size} ranks, has no part of {rank=}")
        )
        return load_state(self._verified(f"rank-{rank}"), *keys)

    def require(self, **facts: Any) -> None:
        """ValueError for the first fact, or field of a fact, that was saved with another value; names both values."""
        for name, saved, expected in self.differences(**facts):
            raise ValueError(f"{self.manifest}: saved with {name}={saved!r}; this run has {expected!r}")

    def differences(self, **facts: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields (name, saved value, given value) for each fact that is not as given.

        If both values of a fact are dicts, each field that differs is yielded in place of the fact, as "fact.field".
        """
        for name, expected in facts.items():
            # Through JSON, as the saved value went: a tuple becomes a list.
            expected, saved = json.loads(json.dumps(expected)), self.facts.get(name)
            if isinstance(saved, dict) and isinstance(expected, dict):
                for key in sorted(saved.keys() | expected.keys()):
                    if saved.get(key) != expected.get(key):
                        yield f"{name}.{key}", saved.get(key), expected.get(key)
            elif saved != expected:
                yield name, saved, expected

    def verify(self) -> None:
        """ValueError, with the file, unless every file is there with its length and SHA-256."""
        for name in self.files:
            self._verified(name)

    def _verified(self, name: str) -> Path:
        """The file of a part. ValueError unless it is as it was saved."""
        values.hold((name in self.files, f"{self.manifest}: names no file of {name!r}"))
        entry = self.files[name]
        path = self.manifest.with_name(entry["file"])
        values.hold((path.is_file(), f"{path}: is missing"))
        size, saved = path.stat().st_size, entry["bytes"]
        values.hold(
            (size == saved, f"{path}: has {size:,} bytes and was saved with {saved:,}"),
            (files.sha256_of(path) == entry["sha256"], f"{path}: its SHA-256 is not the one that it was saved with"),
        )
        return path


def save(
    folder: Path,
    step: int,
    shared: State,
    own: State | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    keep: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    gather: Callable[[Any], list[Any]] = lambda mine: [mine],
) -> Path:
    """Saves a checkpoint; returns its manifest's path when all is on the disk. All ranks call it.

    shared   the state that all ranks have in common: that of rank 0 is saved
    own      this rank's own part
    facts    plain values about the run, which `Checkpoint.require` and `differences` compare at a resume
    keep     how many checkpoints stay: this one and the `keep` - 1 of the latest earlier steps; None: all
    gather   a collective: it takes this rank's value and returns the values of all ranks, by rank, as
             `all_gather_object` does

    SaveError on every rank when one of them fails, as with a full disk; ValueError for keep < 1 or step < 0.
    """
    values.whole("step", step, least=0)
    values.whole("keep", 1 if keep is None else keep, least=1)
    folder = values.path("folder", folder)
    manifest = folder / f"step-{step:08}.json"
    parts = {**({"shared": shared} if rank == 0 else {}), f"rank-{rank}": own or {}}
    reports = gather(_attempt(_write_parts, folder, step, parts))  # by rank: (entries of the manifest, failure or None)
    failure = None
    if rank == 0 and not any(failed for _, failed in reports):
        files = {name: entry for entries, _ in reports for name, entry in entries.items()}
        content = {"format": _FORMAT, "step": step, "world_size": world_size, "facts": facts or {}, "files": files}
        _, failure = _attempt(_commit, manifest, content)
    reports += gather((None, failure))
    if rank == 0:
        # After a failure, too: ranks have written parts to the folder that no manifest names.
        _, untidy = _attempt(_tidy, folder, step, keep)
        if untidy:  # a warning, since rank 0 alone would raise an error; the next save tidies up again
            warnings.warn(f"{folder}: files that no checkpoint needs are left: {untidy}", stacklevel=2)
    if failures := dict.fromkeys(failed for _, failed in reports if failed):
        raise SaveError(f"{manifest}: could not be saved: {'; '.join(failures)}; earlier checkpoints stand")
    return manifest


def newest(folder: Path, verified: bool = True) -> Checkpoint | None:
    """The checkpoint of the highest step in a folder, or None. A damaged one is skipped with a warning.

    verified  True: all its files are read and compared with their checksums; False: its manifest alone is read
    """
    for manifest in _manifests(values.path("folder", folder)).values():
        try:
            saved = read(manifest)
            if verified:
                saved.verify()
            return saved
        except ValueError as error:
            warnings.warn(f"checkpoint passed over: {error}", stacklevel=2)
    return None


def read(manifest: Path) -> Checkpoint:
    """The checkpoint that a manifest describes. ValueError for what is no manifest, or one of another format."""
    content = strict_json.read_json(
        values.path("manifest", manifest), sha256=str, format=int, step=int, world_size=int, facts=dict, files=dict
    )
    values.hold(
        (
            content.pop("sha256") == files.digest_of(content),
            f"{manifest}: its SHA-256 is not the one that it was saved with",
        ),
        (
            content["format"] == _FORMAT,
            f"{manifest}: format {content['format']} is not the {_FORMAT} of this version; update lmsys",
        ),
    )
    kinds = {"file": str, "bytes": int, "sha256": str}
    for part, entry in content["files"].items():
        where = f"{manifest}: files.{part}: must be"
        values.hold(
            (
                isinstance(entry, dict) and all(type(entry.get(name)) is kind for name, kind in kinds.items()),
                f"{where} an object with file, bytes and sha256; got {values.shortly(entry)}",
            )
        )
        values.hold(
            (
                re.fullmatch(r"[\w.-]{1,200}", entry["file"]),
                f"{where} a file beside the manifest; got {values.shortly(entry['file'])}",
            )
        )
    return Checkpoint(Path(manifest), content["step"], content["world_size"], content["facts"], content["files"])


def _write_parts(folder: Path, step: int, parts: Mapping[str, State]) -> dict[str, dict[str, Any]]:
    """Writes each part to a file; returns the manifest's entry of each part."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, state in parts.items():
        path = folder / f"step-{step:08}-{name}-{secrets.token_hex(4)}.pt"
        with files.replacing(path) as file:
            torch.save(state, file)
        entries[name] = {"file": path.name, "bytes": path.stat().st_size, "sha256": files.sha256_of(path)}
    return entries


def _commit(manifest: Path, content: Mapping[str, Any]) -> None:
    """Writes the manifest. Its entry "sha256" is the checksum of its other content."""
    _sync_folder(manifest.parent)  # the names of the parts are on the disk before that of the manifest
    files.write_json(manifest, {**content, "sha256": files.digest_of(content)})
    _sync_folder(manifest.parent)


def _sync_folder(folder: Path) -> None:
    """Returns when the names of the folder's files are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """(what the function returns, None), or (None, what failed): an error here would leave the other ranks waiting."""
    try:
        return function(*arguments), None
    except Exception as error:
        cause: BaseException | None = error  # torch hides the reason of a failed write behind an error of its own
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        cause = cause or error
        return None, f"{type(cause).__name__}: {cause}"


def _tidy(folder: Path, step: int, keep: int | None) -> None:
    """Removes the checkpoints beyond `keep`, and parts that no manifest names, such as those of killed saves.

    Checkpoints of later steps stay and do not count. They are there when a run has gone back to an earlier checkpoint,
    for example because the newest was damaged. Files with names that no save writes stay too, and so do manifests that
    cannot be read, with their parts.
    """
    named, unknown, count = set[str](), set[int](), 0
    for saved_step, manifest in _manifests(folder).items():
        try:
            files = read(manifest).files
        except ValueError:
            unknown.add(saved_step)
        else:
            count += saved_step <= step
            if keep is not None and count > keep:
                manifest.unlink(missing_ok=True)
            else:
                named |= {entry["file"] for entry in files.values()}
    for path in folder.glob("step-*"):  # none where the folder could not be made
        written = _WRITTEN.fullmatch(path.name)
        if written and path.name not in named and int(written[1]) not in unknown and not path.is_dir():
            path.unlink(missing_ok=True)


def _manifests(folder: Path) -> dict[int, Path]:
    """The manifests in a folder by step, the highest first."""
    by_step = {}
    for path in folder.glob("step-*.json"):
        match = _MANIFEST.fullmatch(path.name)
        if match and not path.is_dir():
            by_step[int(match[1])] = path
    return dict(sorted(by_step.items(), reverse=True))


File = str | os.PathLike[str] | IO[bytes]


@runtime_checkable
class Stateful(Protocol):
    """An argument of `save_checkpoint`: a module, an optimizer, or an object that joins several of them."""

    def state_dict(self) -> Any:
        """The state, as `torch.save` takes it."""


def save_checkpoint(model: torch.nn.Module, optimizer: torch.optim.Optimizer, iteration: int, out: File) -> None:
    """Saves a dictionary of `model`, `optimizer` (their state dicts) and `iteration` to a path or a binary file.

    A path's folder is made, and its file is replaced only once the new one is complete. numpy's numbers in the
    optimizer's state, such as a learning rate, become Python's. ValueError unless iteration is a whole number from 0
    on, and for a state that `load_checkpoint` would refuse.
    """
    values.hold(
        (isinstance(out, str | os.PathLike) or hasattr(out, "write"), f"{out=} must be a path or a binary file")
    )
    state = {
        "model": values.instance("model", model, Stateful).state_dict(),
        "optimizer": torch.utils._pytree.tree_map_only(
            np.generic, lambda number: number.item(), values.instance("optimizer", optimizer, Stateful).state_dict()
        ),
        "iteration": values.whole("iteration", iteration, least=0),
    }
    # torch lists the types that `torch.load` would refuse only for a file, not for a state. So the state is first saved
    # into a file in memory, without its tensors, which may be large.
    without_tensors = io.BytesIO()
    torch.save(torch.utils._pytree.tree_map_only(torch.Tensor, lambda _: None, state), without_tensors)
    without_tensors.seek(0)
    refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(without_tensors))
    values.hold(
        (
            not refused,
            f"{out}: a state must hold tensors and plain values alone, to be loaded again; this one needs {refused}",
        )
    )
    with files.replacing(Path(out)) if isinstance(out, str | os.PathLike) else nullcontext(out) as file:
        torch.save(state, file)


def load_checkpoint(src: File, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the state of model and optimizer in place; returns the iteration that `save_checkpoint` was given.

    src  the path, or a binary file

    No code of the file runs. ValueError for a file that holds something else, or the state of another model.
    """
    values.hold((isinstance(src, str | os.PathLike) or hasattr(src, "read"), f"{src=} must be a path or a binary file"))
    state = load_state(Path(src) if isinstance(src, str | os.PathLike) else src, "model", "optimizer", "iteration")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{src}: does not fit this model and optimizer: {error}") from error
    return values.whole("iteration", state["iteration"], least=0)


def load_state(path: Path | IO[bytes], *keys: str) -> dict[str, Any]:
    """The dictionary of tensors and plain values in a file of `torch.save`, on the CPU. No code of the file runs.

    path  the path, or an open binary file
    keys  entries that the dictionary must have

    ValueError, with the path, for a file that holds something else, or lacks one of `keys`.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a wrong pickle raises almost any kind
        raise ValueError(
            f"{path}: must hold tensors and plain values alone; loading it gives"
            f" {getattr(error, 'strerror', None) or type(error).__name__}"  # such as: No such file or directory
        ) from error
    values.hold((isinstance(state, dict), f"{path}: must hold a dictionary; got a {type(state).__name__}"))
    if missing := [key for key in keys if key not in state]:
        raise ValueError(f"{path}: must have {missing[0]!r}; got {values.shortly(list(state))}")
    return state
