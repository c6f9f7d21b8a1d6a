"""`lmsys.model.rotary`: laws of the rotation of queries and keys, and its Triton kernel against plain PyTorch.

Queries and keys are rotated by angles that grow with their position. A projection x (B, S, (H + 2 Hkv) * D) holds
queries, keys and values side by side; `draw` makes one. The rotation may be in place. Positions are 0 to S - 1 ("-"),
or a tensor that the batch shares ("s"), or one with positions of each sequence ("b").
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmsys.attention.compiled import why_no_compiler
from lmsys.kernels import HAS_TRITON
from lmsys.model import fused
from lmsys.model.rotary import RotaryEmbedding, _Rotate, _RotateInPlace, rotate, rotate_backward

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="pip install triton to test its kernels")
sizes = st.tuples(*(st.integers(1, n) for n in (3, 6, 6, 4, 10)))  # B, S, H, Hkv, D / 2
seeds = st.integers(0, 2**16)


def draw(size: tuple[int, ...], seed: int, dtype: torch.dtype, device: str = "cpu") -> tuple[RotaryEmbedding, Tensor]:
    """(the rotation for a context of 16 tokens, a random projection that requires gradients)"""
    batch, length, heads, kv_heads, half = size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, (heads + 2 * kv_heads) * 2 * half, generator=generator)
    return RotaryEmbedding(2 * half, 16, 10_000.0, device), x.to(device, dtype).requires_grad_()


@given(sizes, seeds)
def test_values_are_copied_and_queries_and_keys_keep_their_norm(size: tuple[int, ...], seed: int) -> None:
    batch, length, heads, kv_heads, half = size
    rope, x = draw(size, seed, torch.float64)
    q, k, v = rope.double()(x, heads, None)
    parts = x.unflatten(-1, (-1, 2 * half)).split([heads, kv_heads, kv_heads], dim=2)
    assert torch.equal(v, parts[2])
    for turned, part in ((q, parts[0]), (k, parts[1])):
        torch.testing.assert_close(turned.norm(dim=-1), part.norm(dim=-1), rtol=1e-6, atol=0)  # the angles are float32
        assert torch.equal(turned[:, 0], part[:, 0])  # position 0: not turned


@given(sizes, seeds, st.sampled_from("-sb"))
def test_rotate_equals_the_rotation_of_queries_in_a_projection(size: tuple[int, ...], seed: int, where: str) -> None:
    batch, length, heads, _, half = size
    rope, x = draw(size, seed, torch.float32)
    positions = {"-": None, "s": torch.randint(16, (length,)), "b": torch.randint(16, (batch, length))}[where]
    queries = x.unflatten(-1, (-1, 2 * half))[:, :, :heads].transpose(1, 2)  # (B, H, S, D)
    of_heads = positions[:, None] if where == "b" else positions
    assert torch.equal(rope.rotate(queries, of_heads).transpose(1, 2), rope(x, heads, positions)[0])
    assert rope.rotate(queries.bfloat16(), of_heads).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "positions", "message"),
    [
        ((2, 5, 6), None, r"x must be \(..., S, 8\) with S <= 16; got shape \(2, 5, 6\)"),
        ((17, 8), None, r"S <= 16; got shape \(17, 8\)"),
        ((8,), None, r"got shape \(8,\)"),
        ((2, 5, 8), torch.arange(4), r"positions must broadcast to \(2, 5\); got shape \(4,\)"),
        ((2, 5, 8), torch.tensor([16]), "positions in the context from 0 to 15; got 16"),
        ((2, 5, 8), [0, 1, 2, 3, 4], "must be a tensor of positions in the context"),
    ],
)
def test_tensors_of_wrong_shapes_or_positions_are_refused(
    shape: tuple[int, ...], positions: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(8, 16, 10_000.0).rotate(torch.zeros(shape), positions)


@needs_triton
@settings(max_examples=8)
@given(size=sizes, seed=seeds, dtype=st.sampled_from([torch.float32, torch.float16]), where=st.sampled_from("-sb"))
def test_the_kernel_equals_the_plain_rotation(
    size: tuple[int, ...], seed: int, dtype: torch.dtype, where: str, device: str
) -> None:
    """Forward and backward."""
    batch, length, heads, _, half = size
    rope, x = draw(size, seed, dtype)
    positions = {"-": None, "s": torch.randint(16, (length,)), "b": torch.randint(16, (batch, length))}[where]
    plain = rope(x, heads, positions)
    grads = [torch.randn_like(part) for part in plain]
    (dx,) = torch.autograd.grad(plain, x, grads)
    cos, sin = (t[:length] if positions is None else t[positions] for t in (rope.cos, rope.sin))
    angles = [t.to(device) for t in (cos, sin)]
    parts = rotate(x.detach().unflatten(-1, (-1, 2 * half)).to(device), *angles, heads)
    together = rotate_backward(*(g.to(device) for g in grads), *angles)
    torch.testing.assert_close([x.cpu() for x in (*parts, together.flatten(-2))], [*plain, dx])


@needs_triton
@settings(max_examples=8)
@given(
    size=sizes, seed=seeds, dtype=st.sampled_from([torch.float32, torch.float16]), positioned=st.booleans(),
    together=st.booleans(),
)  # fmt: skip
def test_the_rotation_in_place_has_the_same_bits(
    size: tuple[int, ...], seed: int, dtype: torch.dtype, positioned: bool, together: bool, device: str
) -> None:
    """Gradients may be parts of one tensor, in which they are rotated back in place, or tensors of their own."""
    batch, length, heads, kv_heads, half = size
    rope, x = draw(size, seed, dtype, device)
    positions = torch.randint(16, (batch, length), device=device) if positioned else torch.arange(length, device=device)
    cos, sin = rope.cos[positions], rope.sin[positions]
    gradient = torch.randn(batch, length, heads + 2 * kv_heads, 2 * half, device=device).to(dtype)
    results = []
    for function in (_Rotate, _RotateInPlace):
        projected = (x * 1).unflatten(-1, (-1, 2 * half))
        parts = function.apply(projected, cos, sin, heads)
        grads = gradient.clone().split([heads, kv_heads, kv_heads], dim=2)
        given = grads if together else [g.clone() for g in grads]
        results.append([*parts, *torch.autograd.grad(parts, x, given)])
        storages = {part.untyped_storage().data_ptr() for part in (projected, *parts)}
        assert len(storages) == (1 if function is _RotateInPlace else 4)
    assert all(map(torch.equal, *results))


@needs_triton
def test_a_backward_that_needs_the_projection_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotation in place overwrites a projection that the backward of `exp` needs.

    A second rotation of one projection also overwrites the result of the first, which the backward of `square` needs.
    """
    monkeypatch.setattr(fused, "needs_plain_torch", lambda x: False)
    rope, x = draw((1, 3, 1, 1, 2), 0, torch.float32, device)
    kept = rope(x.exp(), 1, None, in_place=True)[0]
    projected = x * 1
    once, again = rope(projected, 1, None, in_place=True)[0].square(), rope(projected, 1, None, in_place=True)[0]
    for result in (kept, once + again):
        with pytest.raises(RuntimeError, match="modified .*inplace"):
            result.sum().backward()


@needs_triton
def test_compiled_code_does_not_rotate_in_place(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "needs_plain_torch", lambda x: False)
    rope, x = draw((2, 5, 4, 2, 4), 0, torch.float32, device)
    before = x.detach().clone()
    expected = rope(x, 4, None)
    turned = torch.compile(rope, backend="eager", fullgraph=True, dynamic=False)(x, 4, None, in_place=True)
    assert torch.equal(x, before) and all(map(torch.equal, turned, expected))


@needs_triton
def test_tables_of_angles_may_have_either_dtype(device: str) -> None:
    """A compiled kernel is kept for later calls, but tables in float64 need another one than those in float32."""
    heads, cos, sin = (torch.randn(shape, device=device) for shape in ((2, 7, 3, 16), (7, 8), (7, 8)))
    turned = [rotate(heads, cos.to(dtype), sin.to(dtype), 1) for dtype in (torch.float32, torch.float64)]
    assert all(map(torch.equal, *turned))


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_the_kernel_is_differentiated_and_compiled(dtype: torch.dtype, compiled: bool, in_place: bool) -> None:
    rope, x = draw((2, 16, 25, 5, 40), 0, dtype, "cuda")
    function = torch.compile(rope, fullgraph=True, dynamic=False) if compiled else rope
    rotated, expected = function(x * 1, 25, None, in_place), [y.cuda() for y in rope.cpu()(x.cpu(), 25, None)]
    grads = [torch.randn_like(part).transpose(1, 2).contiguous().transpose(1, 2) for part in rotated]
    for x_rotated, x_expected in zip(rotated, expected, strict=True):
        torch.testing.assert_close(x_rotated, x_expected)
    gradients = (torch.autograd.grad(parts, x, grads)[0] for parts in (rotated, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.long
@pytest.mark.skipif(why_no_compiler("cpu") is not None, reason=str(why_no_compiler("cpu")))
def test_compiled_equals_eager() -> None:
    rope, x = draw((2, 5, 4, 2, 4), 0, torch.float32)
    compiled = torch.compile(lambda x: rope(x, 4, None), fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), rope(x, 4, None))
