"""`Documents`: documents packed one after another into a sequence, as an option of `attention`.

A user makes one `Documents` for many calls. So the object also keeps tensors that attention rows (implementations)
derive from it, such as masks: see `keep`, and `kept_on_documents` in pattern.py. `Pattern` reads `key_starts`,
`key_ends` and `places`; the rows in peers_flash_attn.py, which call other people's FlashAttention, read `cu_seqlens`. A
new attribute that kernels need under torch.compile must also be in `parts`, and `of_parts` must set it.

Legend: B batch entries, S tokens of a batch entry.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lmsys.autograd import is_watched
from lmsys.values import hold, instance, shortly, whole

INTEGERS = (torch.int32, torch.int64)  # dtypes of tensors that say where documents lie
FARTHEST = 2**31 - 1  # positions are int32 in kernels


class Documents:
    """Documents that fill sequences of S tokens: `Documents([3, 5])` packs two documents into 8 tokens.

    lengths  tokens of each document, in order; or one such list for each batch entry, all with the same sum
    device   the device of the tensors that attention will be given
    keys     the documents that hold the keys, if queries and keys are not the same tokens. They must be as many as the
             documents of the queries: in `Documents([1, 2], keys=Documents([3, 5]))` the first document has one query
             and 3 keys, the second two queries and 5 keys

    These attributes are computed from the lengths:

    starts, ends          (B, S) or, if all batch entries are packed alike, (1, S), int32: for each token the first
                          token of its document, and the first token after its document
    key_starts, key_ends  of the same shape, int32: the interval of keys of a token's document, [key_starts, key_ends)
    places                of the same shape, int32: the position of a token, as a query, among the keys. The last query
                          of a document has the position of its last key
    longest               the number of tokens of the longest document

    ValueError for a length that is not a positive integer, for batch entries whose lengths have different sums, and for
    `keys` with another number of documents.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        keys: "Documents | None" = None,
    ):
        self.lengths, self._keys = tuple(map(_checked, _rows(lengths))), instance("keys", keys, Documents | None)
        sums, counts = [sum(row) for row in self.lengths], [len(row) for row in self.lengths]
        hold(
            (
                len(set(sums)) == 1,
                f"documents must fill all batch entries alike; their lengths add up to {shortly(sums)}",
            ),
            (
                [len(row) for row in self.keys.lengths] == counts,
                f"keys={shortly(keys)} must be of as many documents as {shortly(self.lengths)}",
            ),
        )
        self.longest = max(map(max, self.lengths))
        ends = [list(accumulate(row)) for row in self.lengths]
        self._edges = [[0, *row[:-1]] for row in ends], ends  # beginnings and ends of documents, by batch entry
        with torch.inference_mode(False):  # the caller may be in inference mode now, and train with the tensors later
            self.starts, self.ends = (self._by_token(x, device) for x in self._edges)
            self.key_starts, self.key_ends = (self._by_token(x, device) for x in self.keys._edges)
            self.places = self.key_ends - self.ends + torch.arange(self.num_tokens, dtype=torch.int32, device=device)
        # Operators get tensors only, but the choice of tile sizes needs this number: `of_parts` reads it here.
        self.starts.longest = self.keys.longest
        self.kept: dict[Hashable, Any] | None = {}  # tensors made from these documents: see `keep`; None: keeps nothing

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Documents":
        """N documents of one sequence, by their edges, as FlashAttention takes them.

        The documents are on the device of `cu_seqlens`. ValueError if it does not begin with 0 or does not increase.

        cu_seqlens  (N + 1,) int32 or int64, 0, ..., S: the start of each document, and the end of the last
        """
        _check_tokens("cu_seqlens", cu_seqlens, dims=(1,))
        edges = cu_seqlens.tolist()
        lengths = [end - start for start, end in zip(edges, edges[1:], strict=False)]
        hold(
            (len(edges) > 1 and edges[0] == 0, f"cu_seqlens={shortly(edges)} must be 0, then where each document ends"),
            (
                all(length > 0 for length in lengths),
                f"cu_seqlens={shortly(edges)} must increase: a document has at least one token",
            ),
        )
        return cls(lengths, cu_seqlens.device)

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """Documents from an id for each token: the tokens of a document have one id.

        The documents are on the device of `ids`. ValueError if tokens with one id are not next to each other.

        ids  (S,) or (B, S), int32 or int64
        """
        _check_tokens("ids", ids, dims=(1, 2))
        lengths = []
        for row in ids if ids.dim() == 2 else [ids]:
            numbers, counts = torch.unique_consecutive(row, return_counts=True)
            hold(
                (
                    len(numbers.unique()) == len(numbers),
                    f"ids, in the order {shortly(numbers.tolist())}: the tokens of a document must stand together",
                )
            )
            lengths.append(counts.tolist())
        return cls(lengths, ids.device)

    @classmethod
    def of_parts(cls, *parts: Tensor) -> "Documents":
        """Documents from the tensors of the property `parts`, for one call of a custom operator.

        These documents keep no derived tensors, and do not know their lengths. Their `longest` is that of the keys, or
        FARTHEST if the first tensor no longer has it.
        """
        documents = cls.__new__(cls)
        documents.starts, documents.ends, documents.key_starts, documents.key_ends, documents.places = parts
        documents.longest, documents._keys, documents.kept = getattr(parts[0], "longest", FARTHEST), None, None
        return documents

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that a custom operator gets in place of the documents, since it takes no Python objects."""
        return self.starts, self.ends, self.key_starts, self.key_ends, self.places

    @property
    def keys(self) -> "Documents":
        """The documents that hold the keys: these documents themselves, if no others were given."""
        return self._keys or self

    def of_entries(self, entries: Sequence[int]) -> "Documents":
        """The documents of some batch entries, given by their numbers."""
        lengths = [self.lengths[entry % self.batch] for entry in entries]  # with `batch` 1 all entries are packed alike
        return Documents(lengths, self.device, self._keys and self._keys.of_entries(entries))

    @property
    def batch(self) -> int:
        """The number of batch entries B, or 1 if all are packed alike."""
        return self.starts.shape[0]

    @property
    def num_tokens(self) -> int:
        """The tokens of a batch entry, S."""
        return self.starts.shape[1]

    @property
    def device(self) -> torch.device:
        return self.starts.device

    def cu_seqlens(self, batch: int) -> Tensor:
        """(N + 1,) int32: the start of each document in `batch` sequences laid end to end, and the end of the last.

        N is the number of documents in all of these sequences.
        """

        def make() -> Tensor:
            lengths = chain.from_iterable(self.lengths if self.batch == batch else self.lengths * batch)
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

        return keep(self.kept, ("cu_seqlens", batch), make, self.device)

    @property
    def positions(self) -> Tensor:
        """(B, S) or (1, S) int64: the place of each token in its own document, from 0 on."""
        return torch.arange(self.num_tokens, device=self.device) - self.starts

    def __repr__(self) -> str:
        keys = "" if self._keys is None else f", keys={self._keys!r}"
        return f"Documents({shortly([list(row) for row in self.lengths])}, device={str(self.device)!r}{keys})"

    def _by_token(self, values: list[list[int]], device: torch.device | str) -> Tensor:
        """(B or 1, S), int32: for each token the value of its document.

        values  for each batch entry, a list with a value for each of its documents
        """
        rows = [
            torch.tensor(row, dtype=torch.int32, device="cpu").repeat_interleave(torch.tensor(lengths, device="cpu"))
            for row, lengths in zip(values, self.lengths, strict=True)
        ]
        return torch.stack(rows).to(device)


def keep(
    kept: dict[Hashable, Any] | None, key: Hashable, make: Callable[[], Any], device: torch.device, most: int = 64
) -> Any:
    """The entry `key` of `kept`; if there is none, make(), which becomes that entry.

    make() does not become an entry if `kept` is None, under a tracer such as torch.compile, or while a CUDA graph is
    captured: the graph then makes the tensors at each replay.

    kept    where results are kept, such as the attribute `kept` of `Documents`; None: nowhere
    device  the device of the tensors that make() returns
    most    if `kept` has so many entries, the oldest is dropped first
    """
    if kept is None or is_watched():
        return make()
    if (made := kept.get(key)) is None:  # a single read, since another thread may drop the entry meanwhile
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return make()
        while len(kept) >= most:  # other threads may add and drop entries meanwhile, so a missing key is no error
            kept.pop(next(iter([*kept]), None), None)
        made = kept[key] = _made_to_last(make, device)
    return made


def _made_to_last(make: Callable[[], Any], device: torch.device) -> Any:
    """make(), called in a new thread, so that later calls can use its tensors.

    Inference mode and the CUDA memory pool are settings of this thread, and do not apply there. Autograd would refuse
    tensors that were made in inference mode. torch.compile's CUDA graphs warm up in a memory pool of their own, and
    raise an error if tensors stay there.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def make_here() -> Any:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            value = make()
            if stream is not None:  # later calls may read the tensors on other streams
                stream.synchronize()
            return value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_here).result()


def _rows(lengths: Any) -> Sequence[Any]:
    """The lengths as one list for each batch entry; a single list becomes [list]. ValueError for anything else."""
    hold(
        (
            not isinstance(lengths, str) and isinstance(lengths, Sequence) and lengths,
            (
                "documents are made of their lengths, as in Documents([3, 5]), or one list of lengths for each"
                " batch entry;"
                f" got {shortly(lengths)}"
            ),
        )
    )
    return lengths if isinstance(lengths[0], Sequence) else [lengths]


def _checked(lengths: Any) -> tuple[int, ...]:
    """The lengths of the documents of one batch entry as a tuple; ValueError if one is not a positive integer."""
    hold(
        (
            isinstance(lengths, Sequence) and len(lengths) > 0,
            f"documents of a batch entry must be a list of lengths; got {shortly(lengths)}",
        )
    )
    lengths = tuple(whole("length of a document", length, least=1, most=FARTHEST) for length in lengths)
    whole("number of tokens of a batch entry", sum(lengths), most=FARTHEST)
    return lengths


def check_integers(name: str, x: Any) -> None:
    """ValueError unless x is a tensor of int32 or int64."""
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be a torch.Tensor of int32 or int64;"
            f" got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        )


def _check_tokens(name: str, x: Any, dims: tuple[int, ...]) -> None:
    """ValueError unless x is a tensor of integers, not empty, whose number of dimensions is among `dims`."""
    check_integers(name, x)
    hold(
        (
            x.dim() in dims and 0 not in x.shape,
            f"{name} must have {' or '.join(map(str, dims))} dimensions of tokens; got {tuple(x.shape)}",
        )
    )
