"""Mixed precision: what rounding does to a long sum, and which dtype autocast gives each tensor. Nothing is timed.

Each study is a function of a dtype and a device that returns fields of the record. A new study is a function here and
an `Entry` in `Precision.cases`, and its fields are declared in `Precision.fields`: the runner refuses a record with
other fields. `benchmarks.layouts.PRECISION` says how the report shows the fields. The runner calls the methods of
`Precision`: they override hooks of `lmsys.bench.Benchmark`, which says when each is called and what it returns.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import layouts, models
from lmsys.attention.contract import DTYPE_NAMES, DTYPES
from lmsys.bench import Benchmark, Candidate, Case, Entry, Field, Grid, Record, Settings, bench, fields
from lmsys.config import ModelConfig

ADDEND, TIMES = 0.01, 1000  # `sums` adds ADDEND to 0 so many times: without rounding the sum is 10
# A model as small as may be: its dtypes are those of a large one.
CONFIG = ModelConfig(
    d_model=64, d_ff=128, num_layers=1, num_heads=2, vocab_size=97, context_length=16, attention="sdpa_math"
)
WATCHED = (  # modules of the model whose outputs are looked at, by name
    "token_embeddings",
    "layers.0.ln1",
    "layers.0.attn.qkv",
    "layers.0.attn",
    "layers.0.ffn.w1",
    "layers.0.ffn",
    "layers.0",
    "ln_final",
    "lm_head",
)


def sums(low: torch.dtype, device: str) -> Record:
    """Adds ADDEND to a running sum TIMES times, in four ways.

    1. The addend and the sum are in float32.
    2. Both are in `low`.
    3. The addend is in `low` and the sum in float32: torch casts the addend as it adds.
    4. As 3, but the addend is cast to float32 first.

    The last two agree: no accumulator brings back what the addend lost when it was rounded. But a sum that is itself
    rounded after each step, as in the second way, loses far more. The sums are made on a CPU, whatever the device.
    """
    exact, rounded, name = torch.tensor(ADDEND, dtype=torch.float32), torch.tensor(ADDEND, dtype=low), DTYPE_NAMES[low]
    return {
        "addend": ADDEND,
        "times": TIMES,
        "sums": [
            {"accumulator": accumulator, "addend": addend, "result": result, "error": result - ADDEND * TIMES}
            for accumulator, addend, result in (
                ("float32", "float32", _total(torch.float32, exact)),
                (name, name, _total(low, rounded)),
                ("float32", name, _total(torch.float32, rounded)),
                ("float32", f"{name}, cast to float32", _total(torch.float32, rounded.float())),
            )
        ],
    }


def _total(accumulator: torch.dtype, addend: torch.Tensor) -> float:
    """The sum of TIMES addends, which are added one after another to a zero in the dtype `accumulator`."""
    running = torch.zeros((), dtype=accumulator)
    for _ in range(TIMES):
        running += addend
    return running.item()


def tensors(dtype: torch.dtype, device: str) -> Record:
    """The dtypes of a training step under autocast: of a model's parameters, outputs, loss and gradients."""
    model = models.build(CONFIG, device, seed=0)
    tokens = torch.arange(CONFIG.context_length, device=device)[None]
    outputs: dict[str, torch.dtype] = {}

    def note(name: str, _: torch.nn.Module, __: Any, output: Any) -> None:
        outputs[name] = output.dtype

    for name in WATCHED:
        model.get_submodule(name).register_forward_hook(partial(note, name))
    with torch.autocast(device, dtype):
        model(tokens)
        loss = model.loss(tokens, tokens)
    loss.backward()
    weight = model.layers[0].attn.q_proj.weight
    dtypes = {
        "parameters": weight.dtype,
        **{f"output of {name}": outputs[name] for name in WATCHED},
        "loss": loss.dtype,
        "gradients": weight.grad.dtype,
    }
    return {"tensors": [{"name": name, "dtype": DTYPE_NAMES[kept_in]} for name, kept_in in dtypes.items()]}


@dataclass(frozen=True)
class Study(Case):
    """One study in one dtype of lower precision."""

    dtype: str

    @property
    def impl(self) -> str:
        """The dtype: it is the name of this case's row in records and reports.

        In other benchmarks this is the name of the entry. Here the entry is the study, whose name is the section.
        """
        return self.dtype

    @property
    def comparison(self) -> str:
        return f"precision-{self.section}"


class Precision(Benchmark):
    """Two studies that say what rounding does; nothing is timed."""

    name = "precision"
    layout = layouts.PRECISION
    fields: tuple[Field, ...] = fields.columns("dtype", fields.details("addend", "times", "sums", "tensors"))

    def cases(self, grid: Grid, settings: Settings) -> Iterator[Study]:
        for entry in (
            Entry("accumulation", "benchmarks.bench_precision:sums"),
            Entry("autocast", "benchmarks.bench_precision:tensors"),
        ):
            yield from (Study(entry.name, entry, settings.device, dtype) for dtype in ("float16", "bfloat16"))

    def open(self, candidate: Candidate, setup: None) -> None:
        """Runs the study, whose fields go into the record."""
        candidate.notes |= candidate.entry.load()(DTYPES[candidate.case.dtype], candidate.case.device)
        candidate.reason = "a study: nothing is timed"

    def turns(self, cases: Sequence[Study]) -> Iterable[Sequence[Study]]:
        """No turns: nothing is sampled."""
        return ()


test_precision = bench(Precision)
