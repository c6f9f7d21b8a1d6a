"""Mixed precision in two small tables: what rounding does to a long sum, and which dtype autocast gives each tensor.

`python -m lmsys.model.precision` prints both as Markdown, for the GPU where there is one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lmsys.config import ModelConfig
from lmsys.model import TransformerLM

ADDEND, TIMES = 0.01, 1000  # the sum is 10
CONFIG = ModelConfig(64, 128, 1, 2, vocab_size=97, context_length=16, attention="sdpa_math")


@dataclass(frozen=True)
class Sum:
    """ADDEND added TIMES times: the dtypes of the running sum and of what is added, and what came out."""

    accumulator: str
    addend: str
    result: float

    @property
    def error(self) -> float:
        return self.result - ADDEND * TIMES


def accumulation(low: torch.dtype = torch.float16) -> list[Sum]:
    """The four ways: all in float32, all in `low`, and a float32 sum of `low` values, cast by torch or by hand.

    The last two agree: what the addend lost when it was rounded, no accumulator brings back; but a sum that is itself
    rounded after each step loses far more.
    """

    def total(accumulator: torch.dtype, addend: Tensor) -> float:
        running = torch.zeros((), dtype=accumulator)
        for _ in range(TIMES):
            running += addend
        return running.item()

    exact, rounded = torch.tensor(ADDEND, dtype=torch.float32), torch.tensor(ADDEND, dtype=low)
    name = _name(low)
    return [
        Sum("float32", "float32", total(torch.float32, exact)),
        Sum(name, name, total(low, rounded)),
        Sum("float32", name, total(torch.float32, rounded)),
        Sum("float32", f"{name}, cast to float32", total(torch.float32, rounded.float())),
    ]


def autocast_dtypes(model: TransformerLM, tokens: Tensor, dtype: torch.dtype) -> list[tuple[str, str]]:
    """(tensor, dtype) of a training step of `model` under autocast: of its first block, head and gradients."""
    outputs: dict[str, str] = {}

    names = ["token_embeddings", "layers.0.ln1", "layers.0.attn.qkv", "layers.0.attn", "layers.0.ffn.w1"]
    names += ["layers.0.ffn", "layers.0", "ln_final", "lm_head"]
    watched = {model.get_submodule(name): name for name in names}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if module in watched:
            outputs[watched[module]] = _name(output.dtype)

    with register_module_forward_hook(note):
        with torch.autocast(tokens.device.type, dtype):
            model(tokens)
            loss = model.loss(tokens, tokens)
        loss.backward()
    weight = model.layers[0].attn.q_proj.weight
    assert weight.grad is not None
    found = [("parameters", _name(weight.dtype)), *((f"output of {name}", outputs[name]) for name in names)]
    return [*found, ("loss", _name(loss.dtype)), ("gradients", _name(weight.grad.dtype))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(header: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sums = [(one.accumulator, one.addend, f"{one.result:.5f}", f"{one.error:+.1e}") for one in accumulation()]
    print(f"{ADDEND} added {TIMES} times\n\n{_table(('sum', 'addend', 'result', 'error'), sums)}\n")
    dtypes = {}
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        tokens = torch.arange(16, device=device)[None]
        dtypes[dtype] = dict(autocast_dtypes(TransformerLM(CONFIG, device=device), tokens, dtype))
    rows = [(tensor, *(found[tensor] for found in dtypes.values())) for tensor in dtypes[torch.bfloat16]]
    print(f"Under autocast on {device}\n\n{_table(('tensor', *map(_name, dtypes)), rows)}")


if __name__ == "__main__":
    main()
