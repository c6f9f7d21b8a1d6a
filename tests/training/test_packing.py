"""Packing of documents (`data.packing=documents`): loss and gradients are those of each document computed alone.

A window is a sequence of the model's inputs and targets. It holds several documents or parts of them. No token attends
to another document, and no target lies in another document. `apart` is the slow definition with which results are
compared.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention import Documents
from lmsys.config import IGNORED, ModelConfig
from lmsys.model import TransformerLM
from lmsys.parallel.group import WorkerGroup
from lmsys.testing import error_ratio
from lmsys.tokenizer import train
from lmsys.training.config import RunConfig
from lmsys.training.data import Batches, TokenFiles, fixed_windows, tokenize_files
from lmsys.training.evaluation import Windows, evaluate, model_inputs, unigram
from lmsys.training.generation import Cache
from lmsys.training.loop import Trainer
from lmsys.training.possible import check_attention
from tests.support.training_runs import END_OF_TEXT, Ids, config, first_losses, trainer

END = 0  # the end of text; other ids are larger
CPU = torch.device("cpu")
VOCABULARY = 20
PACKED = ("data.packing=documents", "train.steps=4", "model.vocab_size=300")


def documents(lengths: list[int], seed: int) -> Ids:
    """A source of documents with so many tokens each; the last token of each is END."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, size=sum(lengths))
    ids[np.cumsum(lengths) - 1] = END
    return Ids(ids, END)


def model(attention: str, context: int, dtype: torch.dtype = torch.float64) -> TransformerLM:
    torch.manual_seed(0)
    shape = ModelConfig(16, 32, 2, 2, vocab_size=VOCABULARY, context_length=context, attention=attention)
    return TransformerLM(shape).to(dtype)


def apart(language_model: TransformerLM, windows: Windows, end: int = END, device: torch.device = CPU) -> Tensor:
    """The loss by definition: the model computes each document of the windows by itself. It is a mean over targets.

    end  the id that ends a document
    """
    losses = []
    for inputs, targets in zip(*windows, strict=True):
        window = torch.from_numpy(np.append(inputs, targets[-1]))
        ends = [-1, *np.flatnonzero(inputs == end).tolist(), len(inputs)]
        for before, last in pairwise(ends):
            document = window[before + 1 : last + 1].to(device)
            if len(document) > 1:
                logits = language_model(document[None, :-1])[0]
                losses.append(F.cross_entropy(logits.double(), document[1:], reduction="none"))
    return torch.cat(losses).mean()


def gradients(loss: Tensor, language_model: TransformerLM) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(language_model.parameters())))


@pytest.mark.parametrize("row", ["naive", "vectorized", "flash_torch"])
@settings(max_examples=12)
@given(st.lists(st.integers(1, 14), min_size=4, max_size=20), st.integers(2, 16), st.integers(1, 3), st.integers(0, 9))
def test_loss_and_gradients_are_those_of_each_document_alone(
    row: str, lengths: list[int], context: int, count: int, seed: int
) -> None:
    source = documents([*lengths, 20], seed)
    windows = fixed_windows(source, context, count, END)
    if (windows[1] == IGNORED).all():
        return  # documents of one token have nothing to predict
    tested = model(row, context)
    packed, expected = tested.loss(*model_inputs(*windows, CPU)), apart(tested, windows)
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-12)
    for x, reference in zip(gradients(packed, tested), gradients(expected, tested), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-9, atol=1e-12)
    assert evaluate(tested, windows, 2).tokens == np.count_nonzero(windows[0] != END)
    assert np.isclose(evaluate(tested, windows, 2).loss, expected.item(), rtol=1e-9)


def test_in_float32_the_error_is_that_of_each_document_alone() -> None:
    windows = fixed_windows(documents([1, 5, 9, 2, 30, 4, 12], 0), 16, 3, END)
    reference, plain = (apart(model("naive", 16, dtype), windows) for dtype in (torch.float64, torch.float32))
    for row in ("vectorized", "flash_torch"):
        loss = model(row, 16, torch.float32).loss(*model_inputs(*windows, CPU))
        assert error_ratio(loss, reference.detach(), plain.float()) <= 1


def test_a_batch_says_where_documents_end() -> None:
    source = Ids([3, END, 4, 5, 6, END, END, 7, 8], END)
    inputs, targets = Batches(source, 4, 2, end_of_text=END).batch(0)
    order = np.argsort(inputs[:, 0] == 6)  # the windows of an epoch are shuffled
    assert targets[order].tolist() == [[END, IGNORED, 5, 6], [END, IGNORED, IGNORED, 8]]
    _, _, packed = model_inputs(inputs[order], targets[order], CPU)
    assert packed.lengths == ((2, 2), (2, 1, 1))
    assert packed.positions.tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]
    assert len(model_inputs(inputs, np.where(targets == IGNORED, 1, targets), CPU)) == 2


@given(st.lists(st.integers(1, 9), min_size=8, max_size=40), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
def test_every_target_has_the_same_weight(lengths: list[int], shared: tuple[int, int]) -> None:
    """shared: the numbers of ranks, and of microbatches of a rank, among which a batch of 4 windows is shared."""
    (world_size, accumulation), source = shared, documents([*lengths, 9], 1)
    parts = [
        Batches(source, 5, 4 // (world_size * accumulation), 3, rank, world_size, accumulation, end_of_text=END)
        for rank in range(world_size)
    ]
    count = np.count_nonzero(Batches(source, 5, 4, 3, end_of_text=END).batch(2)[1] != IGNORED)
    targets_of_parts = [
        (part.weight(2, i), part.batch(2, i)[1] != IGNORED) for part in parts for i in range(accumulation)
    ]
    for weight, counted in targets_of_parts:
        assert np.isclose(weight * count, np.count_nonzero(counted) * len(targets_of_parts))
    assert Batches(source, 5, 4).weight(2) == 1


def test_a_micro_batch_without_targets_changes_nothing(tmp_path: Path) -> None:
    """The first of two windows has ends of text alone."""
    source = Ids(np.array([END] * 4 + [5, 6, 7, 8, 9]), END)
    whole, apart_ = (
        Trainer(
            config(tmp_path, *PACKED, "train.batch_size=2", f"train.micro_batch_size={size}", "model.context_length=4"),
            source,
            fixed_windows(source, 4, 2, END),
            CPU,
        ).train_step()[0]
        for size in (2, 1)
    )
    assert whole.taken
    assert apart_.taken
    assert np.isclose([apart_.loss, apart_.norm], [whole.loss, whole.norm], rtol=1e-5).all()


def test_the_unigram_baseline_counts_the_same_targets() -> None:
    source = documents([4, 5, 6, 7, 8], 0)
    evaluation = unigram(source, fixed_windows(source, 6, 3, END), VOCABULARY)
    assert evaluation.tokens == evaluate(model("naive", 6), fixed_windows(source, 6, 3, END), 2).tokens
    assert 0 < evaluation.loss < 2 * np.log(VOCABULARY)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that holds the whole batch."""
    return first_losses(config(tmp_path_factory.mktemp("run"), *PACKED, "train.micro_batch_size=8"), 4)


@pytest.mark.parametrize("setting", ["train.micro_batch_size=2", "model.attention=flash_torch", "train.strategy=zero1"])
def test_losses_do_not_depend_on_how_they_are_computed(tmp_path: Path, expected: list[float], setting: str) -> None:
    losses = first_losses(config(tmp_path, *PACKED, setting), 4)
    assert np.allclose(losses, expected, rtol=1e-5)
    assert not np.allclose(first_losses(config(tmp_path, *PACKED, "data.packing=none"), 4), expected, rtol=1e-3)


@pytest.mark.parametrize("strategy", ["bucketed", "fsdp"])
def test_ranks_have_the_losses_of_one(group: WorkerGroup, tmp_path: Path, expected: list[float], strategy: str) -> None:
    for losses in group.run(first_losses, config(tmp_path, *PACKED, f"train.strategy={strategy}"), 4):
        assert np.allclose(losses, expected, rtol=1e-5)


@pytest.mark.long
def test_compiled_blocks_have_the_same_losses_and_compile_once(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    compiled = TransformerLM.compile_blocks
    monkeypatch.setattr(TransformerLM, "compile_blocks", lambda *x, **y: compiled(*x, **y, backend="aot_eager"))
    training = trainer(config(tmp_path, *PACKED, "train.compile=true"))
    losses = [training.train_step()[0].loss]
    with torch._dynamo.config.patch(error_on_recompile=True):
        losses += [training.train_step()[0].loss for _ in range(3)]
    assert np.allclose(losses, expected, rtol=1e-4)


def test_documents_that_do_not_fill_the_sequences_are_refused() -> None:
    tokens = torch.ones(3, 8, dtype=torch.int64)
    for lengths in ([3, 4], [[3, 5], [4, 4]]):
        with pytest.raises(ValueError, match=r"documents must fill 3 sequences of 8 tokens on cpu; got Documents"):
            model("naive", 8).loss(tokens, tokens, Documents(lengths))
    with pytest.raises(ValueError, match="a cache knows no documents"):
        model("naive", 8).hidden(tokens, documents=Documents([3, 5]), cache=Cache(2, 8))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("naive_compiled", "knows no documents"),
        ("flex", "FlexAttention has no backward on CPU"),
    ],
)
def test_a_row_that_knows_no_documents_is_refused(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"model.attention='{row}' cannot train .*{reason}.*; here these can: naive,"):
        trainer(config(tmp_path, *PACKED, f"model.attention={row}"))
    check_attention(config(tmp_path, *PACKED), 1, CPU)


def test_token_files_know_their_end_of_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one and two<|endoftext|>three and four<|endoftext|>" * 20)
    tokenizer = train([text], 270, ["<|endoftext|>"])
    path = tokenize_files(tokenizer, [text], tmp_path / "ids.npy")
    source = TokenFiles([path], tokenizer)
    assert [source.end_of_text] == tokenizer.encode("<|endoftext|>")
    facts = path.with_suffix(".json")
    known = json.loads(facts.read_text())
    for value, error in ((None, "no end_of_text is named"), (270, "an id from 0 to 269; got 270"), (True, "got True")):
        facts.write_text(json.dumps(known | {"end_of_text": value}))
        with pytest.raises(ValueError, match=error):
            _ = TokenFiles([path], tokenizer).end_of_text
    facts.unlink()
    with pytest.raises(ValueError, match="tokenize the text anew"):
        _ = TokenFiles([path]).end_of_text
    without = tokenize_files(train([text], 270), [text], tmp_path / "without.npy")
    with pytest.raises(ValueError, match="no end_of_text is named in without.json"):
        _ = TokenFiles([without]).end_of_text


def test_token_files_of_different_ends_are_refused(tmp_path: Path) -> None:
    for name, end in (("a", 1), ("b", 2)):
        np.save(tmp_path / f"{name}.npy", np.arange(4, dtype=np.uint16))
        facts = {"tokens": 4, "vocab_size": 4, "tokenizer": "t", "end_of_text": end}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"b\.npy: end_of_text=2 must be 1, as in .*a\.npy"):
        _ = TokenFiles([tmp_path / "a.npy", tmp_path / "b.npy"]).end_of_text


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.on_request),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_training_of_the_default_size_evaluates_documents_alone(tmp_path: Path, device: str) -> None:
    run = RunConfig(str(tmp_path)).changed(["data.packing=documents", f"train.device={device}", "evaluate.windows=8"])
    training = trainer(run.changed(["train.steps=60"]), device=torch.device(device))
    for _ in range(60):
        training.train_step()
    with torch.no_grad():
        plain = apart(training.model, training.windows, END_OF_TEXT, training.device)
        evaluation = training.evaluate()
        reference = apart(training.model.double(), training.windows, END_OF_TEXT, training.device)
    assert error_ratio(torch.tensor(evaluation.loss), reference.cpu(), plain.cpu().float()) <= 1
