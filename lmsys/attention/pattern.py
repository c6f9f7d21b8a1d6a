"""Which keys each query sees, and the cap of its scores: all that a call of attention may ask beside its scale.

Legend: B batch, H query heads, Q queries, K keys, S = Q = K.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lmsys.attention.bounds import Bounds, bounds_of, make_bounds
from lmsys.attention.documents import FARTHEST, INTEGERS, Documents
from lmsys.values import broadcasts, finite, flag, shortly, whole

NO_CAP = 2.0**40  # a softcap from here on changes no score below 2**28 by as much as float32 shows
INTERVALS = "window", "offset", "documents", "key_lengths", "softcap"  # they leave each query an interval of keys
OPTIONS = *INTERVALS, "mask"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Query i sees the keys j that every option lets it see; one that sees none gives zeros.

    causal       j <= i + offset
    window       j > i + offset - window; it needs `causal`
    offset       the position of query 0 among the keys: K - Q for the last queries of a sequence
    documents    those of i's own document; Q = K
    key_lengths  (B,) int32 or int64, taken contiguous: j < key_lengths[b]
    mask         boolean, broadcastable to (B, H, Q, K): True where i sees j
    softcap      scores become softcap · tanh(score / softcap)
    """

    causal: bool = False
    window: int | None = None
    offset: int = 0
    documents: Documents | None = None
    key_lengths: Tensor | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    options: dict[str, Any] = field(init=False, repr=False)  # those given, without `causal`, which every row knows

    def __post_init__(self) -> None:
        if self.key_lengths is not None:
            object.__setattr__(self, "key_lengths", self.key_lengths.contiguous())  # kernels read them by address
        given = {name: getattr(self, name) for name in OPTIONS}
        given = {name: value for name, value in given.items() if value is not None and (name != "offset" or value)}
        object.__setattr__(self, "options", given)

    @property
    def hides(self) -> bool:
        """False where every query sees every key."""
        return self.causal or bool(self.options.keys() - {"softcap"})

    def seen(self, num_queries: int, num_keys: int, device: torch.device, first_query: int = 0) -> Tensor:
        """Where queries from `first_query` on see the first keys, as a boolean that broadcasts to (B, H, Q, K)."""
        rows = slice(first_query, first_query + num_queries)
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        j = torch.arange(num_keys, device=device)
        seen = j <= i if self.causal else torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        if self.window is not None:
            seen = seen & (j > i - self.window)
        if self.documents is not None:
            document = self.documents.starts[:, None]  # (B, 1, S)
            seen = seen & (document[..., rows, None] == document[..., None, :num_keys])
        if self.key_lengths is not None:
            seen = seen & (j < self.key_lengths[:, None, None, None])
        if self.mask is not None:
            mask = self.mask[(None,) * (2 - self.mask.dim())]  # at least (Q, K), each of which may be 1
            mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            seen = seen & (mask if mask.shape[-1] == 1 else mask[..., :num_keys])
        return seen

    def seen_and_blind(
        self, num_queries: int, num_keys: int, device: torch.device, first_query: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """(keys that a query sees, queries that see none): they broadcast to (B, H, Q, K) and (B, H, Q, 1).

        A blind query is shown all keys, so that its softmax is finite. Its output is then to be filled with zeros, and
        its gradients are zeros by that. None: no query is blind.
        """
        seen = self.seen(num_queries, num_keys, device, first_query)
        if not self.options.keys() - {"softcap"}:
            return seen, None  # key 0 is seen by all
        blind = ~seen.any(dim=-1, keepdim=True)
        return seen | blind, blind

    def bounds(self, num_queries: int, num_keys: int, device: torch.device) -> Bounds:
        """The interval of keys that each query sees; a mask has none."""
        assert self.mask is None
        found = bounds_of(self.documents, self.causal, self.window, self.offset, num_queries, num_keys, device)
        return found if self.key_lengths is None else found.until(self.key_lengths)

    def span(self, num_keys: int) -> int:
        """The most keys that a query may see, by its window and documents."""
        longest = num_keys if self.documents is None else min(num_keys, self.documents.longest)
        return longest if self.window is None else min(longest, self.window)

    def of_entries(self, entries: list[int]) -> "Pattern":
        """The pattern of some batch entries; a mask must have all of them."""
        documents = self.documents
        if documents is not None and documents.batch > 1:
            documents = Documents([documents.lengths[entry] for entry in entries], documents.device)
        lengths, mask = (None if x is None else x[entries] for x in (self.key_lengths, self.mask))
        return replace(self, documents=documents, key_lengths=lengths, mask=mask)

    def simplest(self, num_queries: int, num_keys: int) -> "Pattern":
        """The same pattern without what hides nothing: a window as long as the sequence, an offset to its end."""
        found = self
        if found.window is not None and found.window >= num_queries + found.offset:
            found = replace(found, window=None)
        if found.causal and found.window is None and found.offset >= num_keys - 1:
            found = replace(found, causal=False)
        return found if found.causal or not found.offset else replace(found, offset=0)


def intervals(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> Bounds:
    """The pattern's `bounds`, made anew, and those of keys, which a backward reads."""
    numbers = pattern.causal, pattern.window, pattern.offset
    found = make_bounds(pattern.documents, *numbers, num_queries, num_keys, device)
    _ = found.of_keys
    return found


PLAIN = {causal: Pattern(causal) for causal in (False, True)}


def checked_pattern(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    window: int | None,
    documents: Documents | None,
    key_lengths: Tensor | None,
    softcap: float | None,
    offset: int,
    mask: Tensor | None,
) -> Pattern:
    """The pattern of a call on q (..., H, Q, D) and k, which fit together. ValueError names the value at fault."""
    flag("causal", causal)
    if type(offset) is int and offset == 0 and all(x is None for x in (window, documents, key_lengths, softcap, mask)):
        return PLAIN[causal]
    whole("offset", offset, least=0, most=FARTHEST)
    if window is not None:
        whole("window", window, least=1, most=FARTHEST)
        if not causal:
            raise ValueError(f"{window=} needs causal=True: it counts the keys up to a query's own position")
    if softcap is not None and not torch.compiler.is_compiling():  # to which a number may be open
        softcap = finite("softcap", softcap, above=0, most=torch.finfo(torch.float32).max)
        softcap = softcap if softcap < NO_CAP else None
    batch = q.shape[:-3].numel() if q.dim() > 3 else q.shape[0]
    if documents is not None:
        _check_documents(documents, q, k, batch)
    if key_lengths is not None:
        _check_key_lengths(key_lengths, q, k, batch)
    if mask is not None:
        _check_mask(mask, q, k)
        mask = _mask_4d(mask, q)
    found = Pattern(causal, window, int(offset), documents, key_lengths, mask, softcap)
    # A compiler would make code for either side of each comparison of lengths.
    return found if torch.compiler.is_compiling() else found.simplest(q.shape[-2], k.shape[-2])


def _check_documents(documents: Any, q: Tensor, k: Tensor, batch: int) -> None:
    if not isinstance(documents, Documents):
        told = "made once, as by Documents(lengths, device)"
        raise ValueError(f"documents must be lmsys.attention.Documents, {told}; got {shortly(documents)}")
    if not documents.num_tokens == q.shape[-2] == k.shape[-2]:
        told = f"they have {documents.num_tokens} tokens, for {q.shape[-2]} queries and {k.shape[-2]} keys"
        raise ValueError(f"documents must fill the sequence, of as many queries as keys; {told}")
    if documents.batch not in (1, batch):
        raise ValueError(f"documents must be of 1 or {batch} batch entries, as q is; got {documents.batch}")
    if documents.device != q.device:
        raise ValueError(f"documents must be on the device of q, {q.device}; got {documents.device}")


def _check_key_lengths(key_lengths: Any, q: Tensor, k: Tensor, batch: int) -> None:
    if not isinstance(key_lengths, Tensor) or key_lengths.dtype not in INTEGERS:
        told = key_lengths.dtype if isinstance(key_lengths, Tensor) else type(key_lengths).__name__
        raise ValueError(f"key_lengths must be a torch.Tensor of int32 or int64; got {told}")
    if key_lengths.shape != (batch,):
        raise ValueError(
            f"key_lengths must be one for each batch entry, of shape ({batch},); got {tuple(key_lengths.shape)}"
        )
    if key_lengths.device != q.device:
        raise ValueError(f"key_lengths must be on the device of q, {q.device}; got {key_lengths.device}")
    if key_lengths.is_cpu and not torch.compiler.is_compiling():  # on a GPU the host would have to wait for them
        for length in key_lengths.tolist():
            whole("key_lengths", length, least=0, most=k.shape[-2])


def _check_mask(mask: Any, q: Tensor, k: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.layout != torch.strided or mask.is_nested:
        raise ValueError(
            f"mask must be a dense torch.Tensor, or None; got {type(mask).__module__}.{type(mask).__name__}"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, True where a query sees a key; got {mask.dtype}")
    if mask.device != q.device:
        raise ValueError(f"mask must be on the device of q, {q.device}; got {mask.device}")
    scores = (*q.shape[:-1], k.shape[-2])
    if not broadcasts(mask.shape, scores):
        raise ValueError(f"mask must broadcast to the scores' shape {scores}; got {tuple(mask.shape)}")


def _mask_4d(mask: Tensor, q: Tensor) -> Tensor:
    """A mask that broadcasts to (..., H, Q, K), or for q (B, Q, D) to (B, Q, K), as one that does to (B, H, Q, K)."""
    mask = mask[(None,) * (q.dim() - mask.dim())]
    if q.dim() == 3:
        return mask.unsqueeze(1)
    return mask if q.dim() == 4 else mask.expand(*q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
