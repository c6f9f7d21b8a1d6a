"""Closed forms of dev/paper_formulas.py: seconds of a ring, and how many devices a layer keeps busy.

They are compared with sums over the steps of a ring (`walked`), with costs that are added up matmul by matmul and
tensor by tensor (`shards`), and with other meshes of devices.
"""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.paper_formulas import FLOPS, KINDS, Layer, circulating_all_reduce_seconds, ring_seconds

sizes = st.integers(1, 100_000)
layers = st.builds(Layer, sizes, sizes, sizes, st.floats(1e12, 1e16), st.floats(1e9, 1e12))


def walked(world_size: int, steps: int, chunk_bytes: float, bytes_per_s: float) -> float:
    """Seconds of a ring in which every rank sends one chunk to its neighbour in each step, added up step by step."""
    return sum(chunk_bytes / bytes_per_s for _ in range(steps))


@given(st.integers(1, 32), st.floats(1, 1e9), st.floats(1e6, 1e12))
def test_a_ring_takes_its_steps(world_size: int, total: float, bandwidth: float) -> None:
    once = walked(world_size, world_size - 1, total / world_size, bandwidth)
    assert ring_seconds("all_gather", total, world_size, bandwidth) == pytest.approx(once)
    assert ring_seconds("reduce_scatter", total, world_size, bandwidth) == pytest.approx(once)
    assert ring_seconds("all_reduce", total, world_size, bandwidth) == pytest.approx(2 * once)
    whole = walked(world_size, world_size - 1, total, bandwidth)
    assert circulating_all_reduce_seconds(total, world_size, bandwidth) == pytest.approx(whole)


def shards(layer: Layer, kind: str, direction: str, n: int) -> tuple[float, float]:
    """(FLOP, bytes sent) of one of n devices, added up matmul by matmul and tensor by tensor.

    kind  how the layer is divided: "data", "fsdp" or "tensor"
    """
    tokens = layer.tokens / n if kind != "tensor" else layer.tokens
    width = layer.d_ff / n if kind == "tensor" else layer.d_ff
    matmuls = 3 if direction == "forward" else 6  # x W1, x W2, z W3; backward: each towards its input and its weight
    flops = matmuls * 2 * tokens * layer.d_model * width
    weight, output = 2 * layer.d_model * layer.d_ff, 2 * layer.tokens * layer.d_model  # bytes
    part = (n - 1) / n
    sent = {
        ("data", "forward"): 0.0,
        ("data", "backward"): 3 * 2 * part * weight,
        ("fsdp", "forward"): 3 * part * weight,
        ("fsdp", "backward"): 3 * part * weight + 3 * part * weight,
        ("tensor", "forward"): 2 * part * output,
        ("tensor", "backward"): 2 * part * output,
    }
    return flops, sent[kind, direction]


@given(layers, st.integers(1, 64))
def test_seconds_are_those_of_one_device(layer: Layer, n: int) -> None:
    for kind, direction in product(KINDS, FLOPS):
        flops, sent = shards(layer, kind, direction, n)
        assert layer.compute_seconds(direction, n) == pytest.approx(flops / layer.flops_per_s)
        assert layer.communication_seconds(kind, direction, n) == pytest.approx(sent / layer.bytes_per_s)


@given(layers)
def test_up_to_the_most_devices_nobody_waits(layer: Layer) -> None:
    """With more devices than `most_devices`, communication takes longer than computation."""
    ratio = layer.bytes_per_s / layer.flops_per_s
    closed = {
        ("data", "forward"): math.inf,
        ("data", "backward"): 1 + layer.tokens * ratio,
        ("fsdp", "forward"): 1 + layer.tokens * ratio,
        ("fsdp", "backward"): 1 + layer.tokens * ratio,
        ("tensor", "forward"): 1 + 1.5 * layer.d_ff * ratio,
        ("tensor", "backward"): 1 + 3 * layer.d_ff * ratio,
    }
    for (kind, direction), most in closed.items():
        assert layer.most_devices(kind, direction) == pytest.approx(most)
        if most < math.inf:
            for n in (math.floor(most), math.floor(most) + 1):
                waits = layer.communication_seconds(kind, direction, n) > layer.compute_seconds(direction, n)
                assert waits == (n > most) or n == pytest.approx(most, rel=1e-9)


@given(layers, st.booleans(), st.floats(0, 1))
def test_no_other_mesh_keeps_more_devices_busy(layer: Layer, overlapped: bool, where: float) -> None:
    best = layer.largest_mesh(overlapped)
    busy = layer.compute_seconds("forward", best[0] * best[1])
    times = layer.mesh_seconds(*best)
    assert min(best) >= 1 - 1e-9 and (max(times) if overlapped else sum(times)) <= busy * (1 + 1e-6)
    if overlapped:  # with more devices along one axis, communication along it takes longer than the computation
        for mesh in ((best[0] * 1.01, best[1]), (best[0], best[1] * 1.01)):
            assert max(layer.mesh_seconds(*mesh)) > layer.compute_seconds("forward", mesh[0] * mesh[1])
        return
    # Another mesh that is only just busy: `where` draws its FSDP axis, and a bisection finds its tensor axis.
    fsdp = 1 + where * (layer.most_devices("fsdp", "forward") - 1)
    low, high = 1.0, layer.most_devices("tensor", "forward")
    for _ in range(100):
        tensor = (low + high) / 2
        fits = sum(layer.mesh_seconds(fsdp, tensor)) <= layer.compute_seconds("forward", fsdp * tensor)
        low, high = (tensor, high) if fits else (low, tensor)
    assert fsdp * low <= best[0] * best[1] * (1 + 1e-6)
