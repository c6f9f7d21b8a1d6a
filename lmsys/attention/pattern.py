"""`Pattern`: the options of a call of attention, which say what each query sees and what is added to its scores.

`attention` calls `checked_pattern`, which makes a `Pattern` of its arguments. The implementations of attention, which
are the *rows* of the table in table.py, read this `Pattern`. Plain rows ask it for boolean masks (`seen_and_blind`),
flash rows, which work in tiles, for intervals of keys (`bounds`). A new option needs a name in OPTIONS (in HIDING, too,
if it hides keys, and in INTERVALS, if each query still sees one interval), a field of `Pattern`, a check in
`checked_pattern`, a field of `contract.AttentionCase`, and a parameter of `attention`. An option that hides keys is
applied in `Pattern._intervals` or `Pattern.seen`, one that adds to the scores in `Pattern.added`.

Legend: B batch, H query heads, Q queries, K keys.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from lmsys import autograd, values
from lmsys.attention.bounds import Bounds
from lmsys.attention.documents import FARTHEST, Documents, check_integers, keep

NO_CAP = 2.0**40  # a softcap of this size or more changes scores below 2**28 by less than float32 can represent
# The names, in `AttentionCase.options`, of two forms of options that few rows know: `window` as a pair of numbers, and
# `offset` as a tensor.
TWO_SIDED, OFFSETS = "window on both sides", "offset of each entry"
# Options under which a query still sees one interval of keys. (A softcap hides nothing.)
INTERVALS = "window", TWO_SIDED, "prefix", "offset", OFFSETS, "documents", "key_lengths", "softcap"
OPTIONS = (  # fields of `Pattern` beside `causal`, parameters of `attention`
    "window",
    "offset",
    "documents",
    "key_lengths",
    "softcap",
    "mask",
    "prefix",
    "bias",
    "alibi",
    "sinks",
    "return_lse",
)
HIDING = {"window", "prefix", "offset", "documents", "key_lengths", "mask"}  # options that change what a query sees


@dataclass(eq=False)
class Pattern:
    """Query i sees the keys j that every option lets it see; a query that sees none has zeros as its result.

    Nobody may change a `Pattern`, since calls share it. It is not a `frozen` dataclass: that would cost the host a
    microsecond in each call. Below p is the position of query i among the keys: i + offset, or with `documents` the
    place of the query (`Documents.places`) + offset.

    causal       j <= p
    window       with `causal` a number, j > p - window; or (left, right): p - left <= j <= p + right
    prefix       with `causal`, without `window`: also the first `prefix` keys, with `documents` those of i's document
    offset       the position of query 0 among the keys: a number, or (B,) int32 or int64, one for each batch entry
    documents    j is a key of i's own document
    key_lengths  (B,) int32 or int64, copied if not contiguous: j < key_lengths[b]
    mask         boolean, broadcastable to (B, H, Q, K): True where i sees j
    softcap      scores become softcap · tanh(score / softcap)
    bias         broadcastable to (B, H, Q, K): added to the scores
    alibi        (1 or B, H): alibi[b, h] · |p - j| is subtracted from the scores
    sinks        (1 or B, H): the logit of one more key, whose value is zero
    return_lse   the result is o and the log-sum-exp (B, H, Q) of the scores, with the sink: float32, natural log
    """

    causal: bool = False
    window: int | tuple[int, int] | None = None
    offset: int | Tensor = 0
    documents: Documents | None = None
    key_lengths: Tensor | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    prefix: int | None = None
    bias: Tensor | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    return_lse: bool = False
    options: dict[str, Any] = field(init=False, repr=False)  # the options given, without `causal`: every row knows it

    def __post_init__(self) -> None:
        for name in ("key_lengths", "offset"):
            if isinstance(x := getattr(self, name), Tensor):
                setattr(self, name, x.contiguous())  # kernels read them by address
        given = {name: x for name in OPTIONS if (x := getattr(self, name)) is not None}
        self.options = {name: x for name, x in given.items() if not isinstance(x, int) or x}  # 0 and False: not given

    @property
    def read_again(self) -> list[Tensor]:
        """The caller's tensors, other than a bias, that the backward of a flash row reads again.

        The forward saves them, so that autograd raises an error in the backward if one of them has been changed in
        place since. A tensor of inference mode cannot be saved, and is left out.
        """
        return [
            x for x in (self.key_lengths, self.offset, self.alibi) if isinstance(x, Tensor) and not x.is_inference()
        ]

    @property
    def hides(self) -> bool:
        """False where every query sees every key."""
        return self.causal or self.bounded

    @property
    def bounded(self) -> bool:
        """True if an option other than `causal` hides keys from queries."""
        return not HIDING.isdisjoint(self.options)

    @property
    def left(self) -> int | None:
        """How many keys a query sees on the left of its position; None: all."""
        window = self.window
        return window[0] if isinstance(window, tuple) else None if window is None else window - 1

    @property
    def right(self) -> int | None:
        """How many keys a query sees on the right of its position; None: all."""
        return 0 if self.causal else self.window[1] if isinstance(self.window, tuple) else None

    def position(self, num_queries: int, device: torch.device, first_query: int = 0) -> Tensor:
        """The positions among the keys of `num_queries` queries from `first_query` on: (B or 1, Q) int64."""
        rows = slice(first_query, first_query + num_queries)
        offset = self.offset[:, None] if isinstance(self.offset, Tensor) else self.offset
        if self.documents is not None:
            return self.documents.places[:, rows].long() + offset
        return torch.arange(rows.start, rows.stop, device=device)[None] + offset

    def seen(self, num_queries: int, num_keys: int, device: torch.device, first_query: int = 0) -> Tensor:
        """True where a query sees a key: boolean, broadcastable to (B, H, Q, K).

        The queries are the `num_queries` from `first_query` on, the keys are the first `num_keys`.
        """
        if not self.bounded:
            position = self.position(num_queries, device, first_query)[:, None, :, None]
            seen = torch.arange(num_keys, device=device) <= position
            return seen if self.causal else torch.ones_like(seen)
        bounds = self._intervals(num_queries, num_keys, device, first_query)
        seen = bounds.visible(slice(0, num_queries), slice(0, num_keys)).unsqueeze(1)
        rows = slice(first_query, first_query + num_queries)
        return seen if self.mask is None else seen & tile_of(self.mask, rows, slice(num_keys))

    def _intervals(self, num_queries: int, num_keys: int, device: torch.device, first_query: int = 0) -> Bounds:
        """The intervals of keys that queries from `first_query` on see, without regard to a mask.

        The host does not wait for a GPU here.
        """
        position = self.position(num_queries, device, first_query)
        if self.documents is None:
            starts, ends = torch.zeros_like(position), torch.full_like(position, num_keys)
        else:
            rows = slice(first_query, first_query + num_queries)
            starts, ends = self.documents.key_starts[:, rows], self.documents.key_ends[:, rows]
        first, end = starts.expand_as(position), ends.expand_as(position)
        if self.right is not None:
            end = torch.clamp(position + self.right + 1, starts, ends)
        if self.prefix is not None:
            end = torch.maximum(end, torch.minimum(starts + self.prefix, ends))
        if self.left is not None:
            first = torch.clamp(position - self.left, starts, ends)
        first, end = (x.to(torch.int32).contiguous() for x in (first, end))
        bounds = Bounds(first, end, num_keys)
        return bounds if self.key_lengths is None else bounds.until(self.key_lengths)

    def added(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor | None:
        """The bias and ALiBi of the scores of these queries and keys: (B or 1, H or 1, rows, columns or 1), or None."""
        terms = []
        if self.bias is not None:
            terms.append(tile_of(self.bias, rows, columns).to(dtype).expand(-1, -1, rows.stop - rows.start, -1))
        if self.alibi is not None:
            i = self.position(rows.stop - rows.start, self.alibi.device, rows.start)[:, None, :, None]
            j = torch.arange(columns.start, columns.stop, device=self.alibi.device)
            terms.append(-self.alibi[..., None, None].to(dtype) * (j - i).abs())
        return sum(terms[1:], terms[0]) if terms else None

    def seen_and_blind(
        self, num_queries: int, num_keys: int, device: torch.device, first_query: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """(seen, blind): the keys that a query sees, and the queries that see none (blind). Both are boolean.

        They broadcast to (B, H, Q, K) and (B, H, Q, 1); `blind` is None if no query is blind. `seen` shows a blind
        query all keys, so that its softmax is finite. The caller fills its output with zeros, which also makes its
        gradients zero.
        """
        seen = self.seen(num_queries, num_keys, device, first_query)
        if not self.bounded:
            return seen, None  # key 0 is seen by all
        blind = ~seen.any(dim=-1, keepdim=True)
        return seen | blind, blind

    def bounds(self, num_queries: int, num_keys: int, device: torch.device) -> Bounds:
        """The interval of keys that each query sees, for a pattern without a mask.

        It is computed once and kept, but anew in every call if `offset` is a tensor.
        """
        assert self.mask is None
        if isinstance(self.offset, Tensor):
            return self._intervals(num_queries, num_keys, device)
        bounds = _bounds_of(self, num_queries, num_keys, device)
        return bounds if self.key_lengths is None else bounds.until(self.key_lengths)

    def span(self, num_keys: int) -> int:
        """How many keys a query may see at most, by its window and documents."""
        longest = num_keys if self.documents is None else min(num_keys, self.documents.keys.longest)
        return longest if self.left is None or self.right is None else min(longest, self.left + 1 + self.right)

    def of_entries(self, entries: list[int]) -> "Pattern":
        """The pattern of some batch entries. A mask or a bias must have B entries, or one for all."""
        documents = self.documents
        if documents is not None and documents.batch > 1:
            documents = documents.of_entries(entries)
        tensors = {name: x[entries] for name, x in self.options.items() if isinstance(x, Tensor) and len(x) > 1}
        return replace(self, documents=documents, **tensors)

    def simplest(self, num_queries: int, num_keys: int) -> "Pattern":
        """This pattern without options that hide nothing, such as a window as long as the sequence.

        A pattern whose offset is a tensor, whose documents have keys of their own, or with ALiBi is returned as it is.
        """
        # Documents with keys of their own have other positions than the numbers compared below.
        others = self.documents is not None and self.documents.keys is not self.documents
        if isinstance(self.offset, Tensor) or others or self.alibi is not None:
            return self
        simple = self
        # A number as `window` that reaches from the last query, at Q - 1 + offset, back to key 0.
        if isinstance(simple.window, int) and simple.window >= num_queries + self.offset:
            simple = replace(simple, window=None)
        # Query 0, at the position `offset`, sees the last key by causal order or by the prefix, and so do all queries.
        if simple.causal and simple.window is None and max(self.offset, (simple.prefix or 0) - 1) >= num_keys - 1:
            simple = replace(simple, causal=False, prefix=None)
        # Without causal order and without a window, positions do not matter.
        return simple if simple.right is not None or not self.offset else replace(simple, offset=0)


def tile_of(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of x, which broadcasts to (B, H, Q, K), for these queries and keys. It has four dimensions."""
    x = x[(None,) * (4 - x.dim())]
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., columns]


def intervals(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> Bounds:
    """The pattern's `bounds`, computed anew, with their `of_keys`, which a backward reads.

    This is the trait `mask` of rows that read intervals (`lmsys.traits`): benchmarks time it.
    """
    bounds = pattern._intervals(num_queries, num_keys, device)
    _ = bounds.of_keys
    return bounds


def kept_on_documents(make: Callable[..., Any], most: int = 64) -> Callable[..., Any]:
    """A decorator of `make(pattern, *shape)` that keeps its results, at most `most`. The last of `shape` is a device.

    A result may depend on these options alone: causal order, a window, a prefix, an offset that is a number, and
    documents. Results are kept on the documents and freed with them, so a result must not refer to its documents. Where
    a pattern has none, the decorated function itself keeps the results.
    """
    without: dict[Hashable, Any] = {}  # results of patterns without documents

    @wraps(make)
    def kept_or_made(pattern: Pattern, *shape: Any) -> Any:
        return keep(
            without if pattern.documents is None else pattern.documents.kept,
            (make.__qualname__, pattern.causal, pattern.window, pattern.prefix, pattern.offset, *shape),
            partial(make, pattern, *shape),
            shape[-1],
            most,
        )

    return kept_or_made


@kept_on_documents
def _bounds_of(pattern: Pattern, *shape: Any) -> Bounds:
    """The bounds of a pattern without its key lengths. shape: (queries, keys, device).

    If this result is kept for later calls, its `of_keys` is computed here and not at its first use: that may be in
    inference mode or traced.
    """
    causal, documents, prefix = pattern.causal, pattern.documents, pattern.prefix
    bounds = Pattern(causal, pattern.window, pattern.offset, documents, prefix=prefix)._intervals(*shape)
    if not autograd.is_watched() and (documents is None or documents.kept is not None):
        _ = bounds.of_keys
    return bounds


PLAIN = {causal: Pattern(causal) for causal in (False, True)}  # by `causal`: the pattern without options


def checked_pattern(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: int | tuple[int, int] | None,
    documents: Documents | None,
    key_lengths: Tensor | None,
    softcap: float | None,
    offset: int | str | Tensor,
    mask: Tensor | None,
    prefix: int | None,
    bias: Tensor | None,
    alibi: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> Pattern:
    """The pattern of a call on q (..., H, Q, D) and k, which fit together. ValueError names the value at fault."""
    values.flag("causal", causal)
    values.flag("return_lse", return_lse)
    all_seen = window is None and documents is None and key_lengths is None and mask is None and prefix is None
    nothing_else = softcap is None and bias is None and alibi is None and sinks is None and not return_lse
    if all_seen and nothing_else and type(offset) is int and offset == 0:
        return PLAIN[causal]
    batch = q.shape[:-3].numel() if q.dim() > 3 else q.shape[0]
    if window is not None:
        window = _checked_window(window, causal)
    if softcap is not None and not torch.compiler.is_compiling():  # torch.compile may not know its value
        softcap = values.finite("softcap", softcap, above=0, most=torch.finfo(torch.float32).max)
        softcap = softcap if softcap < NO_CAP else None
    if documents is not None:
        _check_documents(documents, q, k, batch)
    if key_lengths is not None:
        _check_lengths("key_lengths", key_lengths, q, batch, k.shape[-2])
    if not (mask is None and bias is None and alibi is None and sinks is None):
        # (name, value, shape that it must broadcast to: that of the scores or of the heads, dtypes that it may have)
        scores, heads = (*q.shape[:-1], k.shape[-2]), q.shape[-3:-2] if q.dim() > 3 else (1,)
        numbers = q.dtype, torch.float32
        for name, x, shape, *dtypes in (
            ("mask", mask, scores, torch.bool),
            ("bias", bias, scores, *numbers),
            ("alibi", alibi, heads, *numbers),
            ("sinks", sinks, heads, *numbers),
        ):
            if x is not None:
                _check_tensor(name, x, q, shape, *dtypes)
        mask, bias = (None if x is None else _as_4d(x, q) for x in (mask, bias))
        if alibi is not None and alibi.requires_grad:
            raise ValueError("alibi must require no gradient; slopes that learn are a bias")
        alibi, sinks = (None if x is None else x.expand(heads)[None] for x in (alibi, sinks))
    if prefix is not None:
        values.whole("prefix", prefix, least=0, most=FARTHEST)
        if not causal or window is not None:
            raise ValueError(f"{prefix=} needs causal=True and no window: it adds keys to those up to a query's own")
    offset = _checked_offset(offset, q, k, batch, documents, key_lengths)
    pattern = Pattern(  # in the order of its fields
        causal, window, offset, documents, key_lengths, mask, softcap, prefix, bias, alibi, sinks, return_lse
    )
    # `simplest` compares lengths: torch.compile would make code for either side of each comparison.
    return pattern if torch.compiler.is_compiling() else pattern.simplest(q.shape[-2], k.shape[-2])


def _checked_window(window: Any, causal: bool) -> int | tuple[int, int]:
    """The window; ValueError unless it is (left, right), or with `causal` a number."""
    if isinstance(window, tuple):
        if len(window) != 2:
            raise ValueError(
                f"{window=} must be a number, or two: the keys on the left of a position, and on the right"
            )
        left, right = (values.whole("window", side, least=0, most=FARTHEST) for side in window)
        return left, right
    if not causal:
        raise ValueError(
            f"{window=} needs causal=True: it counts the keys up to a query's own position; (left, right) has two sides"
        )
    return values.whole("window", window, least=1, most=FARTHEST)


def _checked_offset(
    offset: Any, q: Tensor, k: Tensor, batch: int, documents: Documents | None, key_lengths: Tensor | None
) -> int | Tensor:
    """The offset as a number or a tensor. "end" becomes the offset that puts the last query at the last key."""
    if isinstance(offset, Tensor):
        _check_lengths("offset", offset, q, batch)
        return offset
    if not isinstance(offset, str):
        return values.whole("offset", offset, least=0, most=FARTHEST)
    if offset != "end":
        raise ValueError(f'{offset=} must be a whole number, a tensor of them, or "end"')
    if documents is not None:
        return 0  # documents are aligned at their ends
    return k.shape[-2] - q.shape[-2] if key_lengths is None else key_lengths.clamp(0, k.shape[-2]) - q.shape[-2]


def _check_documents(documents: Any, q: Tensor, k: Tensor, batch: int) -> None:
    """ValueError unless `documents` fit q and k: in type, lengths, batch entries and device."""
    if not isinstance(documents, Documents):
        raise ValueError(
            "documents must be lmsys.attention.Documents, made once, as by Documents(lengths, device);"
            f" got {values.shortly(documents)}"
        )
    tokens, keys = documents.num_tokens, documents.keys.num_tokens
    if (tokens, keys) != (q.shape[-2], k.shape[-2]):
        raise ValueError(
            "documents must fill the sequence, of as many queries as keys unless keys= says more; they have"
            f" {tokens} tokens{'' if tokens == keys else f' and {keys} keys'}, for {q.shape[-2]} queries and"
            f" {k.shape[-2]} keys"
        )
    if documents.batch not in (1, batch):
        raise ValueError(f"documents must be of 1 or {batch} batch entries, as q is; got {documents.batch}")
    if documents.device != q.device:
        raise ValueError(f"documents must be on the device of q, {q.device}; got {documents.device}")


def _check_lengths(name: str, x: Any, q: Tensor, batch: int, most: int | None = None) -> None:
    """ValueError unless x is (batch,) integers on q's device; with `most`, on a CPU, each from 0 to `most`."""
    check_integers(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} must be one for each batch entry, of shape ({batch},); got {tuple(x.shape)}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
    if most is not None and x.is_cpu and not torch.compiler.is_compiling():  # on a GPU the host would wait
        for length in x.tolist():
            values.whole(name, length, least=0, most=most)


def _check_tensor(name: str, x: Any, q: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """ValueError unless x is a tensor of one of these dtypes that broadcasts to `shape`."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        raise ValueError(f"{name} must be a dense torch.Tensor, or None; got {type(x).__module__}.{type(x).__name__}")
    if x.dtype not in dtypes:
        right = "boolean, True where a query sees a key" if torch.bool in dtypes else f"of {q.dtype} or torch.float32"
        raise ValueError(f"{name} must be {right}; got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {x.device}")
    if not values.broadcasts(x.shape, shape):
        what = "one for each head, of shape" if len(shape) == 1 else "the scores' shape"
        raise ValueError(f"{name} must broadcast to {what} {shape}; got {tuple(x.shape)}")


def _as_4d(x: Tensor, q: Tensor) -> Tensor:
    """x as a tensor that broadcasts to (B, H, Q, K).

    x broadcasts to (..., H, Q, K), or to (B, Q, K) where q is (B, Q, D).
    """
    x = x[(None,) * (q.dim() - x.dim())]
    if q.dim() == 3:
        return x.unsqueeze(1)
    return x if q.dim() == 4 else x.expand(*q.shape[:-3], *x.shape[-3:]).flatten(0, -4)
