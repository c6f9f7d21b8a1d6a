"""Activation checkpointing by levels (`lmsys.checkpointing`): equal bits, the predicted memory, and no needless work.

A level says what a block keeps for its backward: "none" is no checkpointing, "whole" keeps only the block's input;
"matmuls" and "attention" lie between. A setting names a level for each group of blocks. A row is an implementation of
attention.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmsys.attention import ATTENTION
from lmsys.checkpointing import LEVELS, for_fewer, groups_of, setting_of
from lmsys.config import ModelConfig
from lmsys.cost import memory as cost_memory
from lmsys.cost.memory import kept_bytes
from lmsys.measure.memory import saved_bytes
from lmsys.model import TransformerLM
from lmsys.model.transformer import attention_case
from tests.model.test_model import ROWS, needs_compiler
from tests.support.variants import by_default_all_but

VOCABULARY = 29
CONFIGS = st.builds(
    lambda heads, group, dim, **sizes: ModelConfig(
        heads * group * dim, num_heads=heads * group, num_kv_heads=heads, vocab_size=VOCABULARY, context_length=16,
        **sizes,
    ),
    heads=st.integers(1, 2),
    group=st.integers(1, 2),
    dim=st.sampled_from([4, 8]),
    d_ff=st.integers(1, 40),
    num_layers=st.integers(1, 4),
)  # fmt: skip
BIG = ModelConfig(64, 160, 2, 4, num_kv_heads=2, vocab_size=VOCABULARY, context_length=32, attention="sdpa_flash")


def model_of(config: ModelConfig, device: str = "cpu", seed: int = 0) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(config, device)


def inputs(config: ModelConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (2, config.context_length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def step(model: TransformerLM, precision: str, seed: int = 0) -> dict[str, Tensor]:
    """{name: tensor} of the loss and all gradients of a training step."""
    device = model.lm_head.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model.loss(*(x.to(device) for x in inputs(model.config, seed)))
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len([*model.parameters()])
    return {"loss": loss.detach(), **gradients}


def assert_equal(tested: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name, x in expected.items() if not torch.equal(x, tested[name])] == []


def assert_same_bits(config: ModelConfig, checkpoint_blocks: int | str, precision: str, seed: int) -> None:
    expected, checkpointed = (
        step(model_of(replace(config, checkpoint_blocks=how), seed=seed), precision, seed)
        for how in (0, checkpoint_blocks)
    )
    assert_equal(checkpointed, expected)


@given(
    levels=st.lists(st.sampled_from(LEVELS), min_size=1, max_size=40), fewer=st.integers(1, 8), count=st.integers(0, 40)
)
def test_a_setting_for_fewer_blocks_keeps_its_first_and_last_level(levels: list[str], fewer: int, count: int) -> None:
    def all_of(setting: int | str, num_layers: int) -> list[str]:
        return [group.level for group in groups_of(setting, num_layers) for _ in range(group.first, group.stop)]

    fewer = min(fewer, len(levels))
    levels_of_fewer = all_of(for_fewer(setting_of(levels), len(levels), fewer), fewer)
    assert (
        len(levels_of_fewer) == fewer
        and levels_of_fewer[0] == levels[0]
        and (fewer == 1 or levels_of_fewer[-1] == levels[-1])
    )
    assert for_fewer(setting_of(levels), len(levels), len(levels)) == setting_of(levels)
    if count <= len(levels):
        assert all_of(for_fewer(count, len(levels), fewer), fewer)[0] == ("whole" if count else "none")


@settings(max_examples=12)
@given(config=CONFIGS, data=st.data(), precision=st.sampled_from(["fp32", "bf16"]), seed=st.integers(0, 2**16))
def test_checkpointing_changes_no_bit(config: ModelConfig, data: Any, precision: str, seed: int) -> None:
    groups = st.integers(0, config.num_layers)
    plans = st.lists(st.sampled_from(LEVELS), min_size=config.num_layers, max_size=config.num_layers).map(setting_of)
    config = replace(config, attention=data.draw(st.sampled_from(["naive", "sdpa_flash", "flash_torch"])))
    assert_same_bits(config, data.draw(groups | plans), precision, seed)


@pytest.mark.parametrize("row", by_default_all_but(ROWS, "naive_compiled"))
def test_checkpointing_changes_no_bit_under_any_attention_row(row: str) -> None:
    """It holds for rows that are an operator, a Function that launches kernels, or a compiled graph."""
    assert_same_bits(replace(BIG, attention=row), "attention*1,matmuls*1", "fp32", 1)


class Matmuls(TorchDispatchMode):
    """A mode that counts matmuls."""

    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype)
        return func(*args, **(kwargs or {}))


def matmuls_of_backward(model: TransformerLM, precision: str) -> int:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model.loss(*inputs(model.config))
    with Matmuls() as matmuls:
        loss.backward()
    return matmuls.count


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_repeats_only_the_matmuls_of_the_level(precision: str) -> None:
    """At "attention" these are w1 and w3 of each block; at "whole" all but the last, which autograd does not need."""
    plain, matmuls, attention, whole = (
        matmuls_of_backward(model_of(replace(BIG, checkpoint_blocks=level)), precision) for level in LEVELS
    )
    assert (matmuls - plain, attention - plain) == (0, 2 * BIG.num_layers)
    assert whole > attention


def kept_by_a_block(config: ModelConfig, precision: str, device: str, backend: str | None = None) -> int:
    """The bytes, without parameters, that a second block saves for its backward."""
    by_layers = []
    for layers in (1, 2):
        model = model_of(replace(config, num_layers=layers), device)
        if backend:
            model.compile_blocks(backend=backend)
        batch = [x.to(device) for x in inputs(config)]
        saved: set[int] = set()

        def forward() -> None:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                model.loss(*batch)  # noqa: B023

        def note(x: Tensor) -> Tensor:
            saved.add(x.untyped_storage().data_ptr())  # noqa: B023
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            forward()
        parameters = sum(x.nbytes for x in model.parameters() if x.data_ptr() in saved)
        by_layers.append(saved_bytes(forward) - parameters)
    return by_layers[1] - by_layers[0]


def predicted(config: ModelConfig, level: str, precision: str) -> int:
    """The predicted bytes that a block keeps, for a batch of 2."""
    return kept_bytes(config, level, 2 * config.context_length, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(max_examples=4)
@given(config=CONFIGS)
def test_what_a_block_keeps_is_predicted_to_the_byte(precision: str, config: ModelConfig) -> None:
    if precision == "bf16" and config.head_dim == 4:
        return  # heads of 8 bytes: `aligned` copies them, and the copies are kept, too
    config = replace(config, attention="sdpa_flash")
    for level in LEVELS:
        # Bytes of two normalised inputs in float32, which only a CPU keeps.
        normalised = 2 * 4 * 2 * config.context_length * config.d_model if level == "none" else 0
        kept = kept_by_a_block(replace(config, checkpoint_blocks=level), precision, "cpu")
        assert kept == predicted(config, level, precision) + normalised, level


@needs_compiler
@pytest.mark.parametrize("level", by_default_all_but(["matmuls", "attention"], "matmuls"))
def test_compiled_blocks_keep_the_same_and_change_no_bit(level: str) -> None:
    config = replace(BIG, checkpoint_blocks=level)
    expected = step(model_of(BIG).compile_blocks(backend="aot_eager"), "bf16")
    assert_equal(step(model_of(config).compile_blocks(backend="aot_eager"), "bf16"), expected)
    assert kept_by_a_block(config, "bf16", "cpu", "aot_eager") == predicted(config, level, "bf16")


ON_GPU = ModelConfig(256, 512, 2, 4, vocab_size=VOCABULARY, context_length=256)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", ["flash_triton", "flash_gluon", "flash_cuda", "sdpa_flash", "sdpa_cudnn"])
def test_levels_on_a_gpu(row: str, compiled: bool) -> None:
    """Gradients differ by rounding from those of eager blocks without checkpointing; memory is as predicted."""
    config = replace(ON_GPU, attention=row)
    if reason := ATTENTION[row].why_not(attention_case(config, 2, 256, "bfloat16", torch.device("cuda"), grad=True)):
        pytest.skip(f"{row}: {reason}")
    torch.compiler.reset()  # each level and number of layers compiles, and torch limits compilations in a process
    expected = step(model_of(config, "cuda"), "bf16")
    for level in ("matmuls", "attention"):
        of_level = replace(config, checkpoint_blocks=level)
        model = model_of(of_level, "cuda")
        results = step(model.compile_blocks() if compiled else model, "bf16")
        for name, x in expected.items():
            assert (results[name] - x).norm() <= 0.02 * x.norm(), (level, name)
        backend = "inductor" if compiled else None
        measured = kept_by_a_block(of_level, "bf16", "cuda", backend)
        assert measured == pytest.approx(predicted(config, level, "bf16"), rel=0.15), level


def test_the_table_of_levels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line computes more again, and keeps less, than the one before. "attention" repeats 2 of 3 matmuls of the
    feed-forward."""
    monkeypatch.setattr("sys.argv", ["levels", "--size", "2.7b", "--context", "512", "--batch", "1"])
    cost_memory.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    names, kept, peaks, again = zip(*rows, strict=True)
    assert names == LEVELS and sorted(map(float, kept), reverse=True) == [*map(float, kept)]
    assert float(peaks[0]) >= float(peaks[-1]) and [*map(float, again)] == sorted(map(float, again))
    assert again[:2] == ("0.0", "0.0") and float(again[2]) < float(again[3]) < 100 / 3
