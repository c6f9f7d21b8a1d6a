"""The tuner of tiles: it picks the fastest that fits, keeps the choice on disk, and names a corrupt file.

Where `clock` replaces the timing, nothing is launched: `print` then stands for the function that launches a kernel.
"""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install triton==3.6.0 to test the tuner")

import torch  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from lmsys.attention import tuning  # noqa: E402
from lmsys.attention.tuning import Tile  # noqa: E402

# An answer in the file, as JSON. In `Tile(...)` the numbers have the same order.
TILE = '{"block_q": 64, "block_k": 64, "num_warps": 4, "num_stages": 1}'
CANDIDATES = [Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 128, 8, 2)]
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_tuned_yet(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(tuning, "_chosen", {})
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def clock(
    monkeypatch: pytest.MonkeyPatch, times: dict[Tile, float], drift: float = 0.0, boost: float = 0.0
) -> list[Tile]:
    """Makes `tune` measure these `times`; infinity stands for a tile that does not fit. Returns a list, to which each
    tile is added when it is timed.

    `drift`: measurement n is slower than the first by n times this share of its time. `boost`: the first is faster by
    this share, the second by a tenth of it, and so on, as on a GPU that was idle."""
    timed: list[Tile] = []

    def time(tile: Tile, launch: object, total_ms: float) -> float:
        timed.append(tile)
        return times[tile] * (1 + drift * (len(timed) - 1)) * (1 - boost * 0.1 ** (len(timed) - 1))

    monkeypatch.setattr(tuning, "_time", time)
    monkeypatch.setattr(tuning, "_fits", lambda tile, launch: times[tile] < float("inf"))
    return timed


@given(order=st.permutations([1.0, 2.0, float("inf")]))
def test_the_fastest_that_fits_is_chosen_and_remembered(order: list[float]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuning, "_chosen", {})
        tuning.KEPT.path.unlink(missing_ok=True)
        timed = clock(monkeypatch, dict(zip(CANDIDATES, order, strict=True)))
        best = CANDIDATES[order.index(1.0)]
        assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == best
        assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == best
        monkeypatch.setattr(tuning, "_chosen", {})  # as a later process finds it
        assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == best
        assert len(timed) == len(CANDIDATES) - 1  # one does not fit, and the other takes twice as long: no second look


@given(
    order=st.permutations([1.0, 1.02, 1.04]),
    change=st.fixed_dictionaries({"drift": st.floats(-0.1, 0.1)})
    | st.fixed_dictionaries({"boost": st.floats(0.0, 0.1)}),
)
def test_a_clock_that_drifts_or_was_idle_does_not_change_the_choice(
    order: list[float], change: dict[str, float]
) -> None:
    """A cool GPU speeds the tile that it runs up by more than the best tile is faster than others. The clock of a GPU
    that was idle is higher in the first moments, in which the first tile is timed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuning, "_chosen", {})
        tuning.KEPT.path.unlink(missing_ok=True)
        clock(monkeypatch, dict(zip(CANDIDATES, order, strict=True)), **change)
        assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == CANDIDATES[order.index(1.0)]


@given(
    order=st.permutations([1.0, 1.1, 1.19]),  # of short samples
    steady=st.permutations([1.0, 1.03, 1.05]),
)
def test_of_tiles_that_are_near_each_other_the_best_in_long_work_is_chosen(
    order: list[float], steady: list[float]
) -> None:
    """As on a GPU at its power cap, where a tile that takes less energy overtakes one that is faster for a moment."""
    times = {
        total: dict(zip(CANDIDATES, by_tile, strict=True))
        for total, by_tile in ((tuning.SHORT_MS, order), (tuning.STEADY_MS, steady))
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuning, "_fits", lambda tile, launch: True)
        monkeypatch.setattr(tuning, "_time", lambda tile, launch, total: times[total][tile])
        assert tuning._fastest(CANDIDATES, print) == CANDIDATES[steady.index(1.0)]


@given(one=st.floats(0.001, 500.0), total_ms=st.sampled_from([tuning.SHORT_MS, tuning.STEADY_MS]))
def test_a_sample_takes_about_as_long_as_it_is_told(one: float, total_ms: float) -> None:
    """Launches that take long are few, and short ones, which may wait for the host, are timed one by one."""
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tuning, "_burst", lambda tile, launch, count: counts.append(count) or one)
        monkeypatch.setattr(tuning.triton.testing, "do_bench", lambda function, **_: -1.0)
        assert tuning._time(CANDIDATES[0], print, total_ms) == (-1.0 if one < tuning.HOST_MS else one)
    assert counts == [1] or (one >= tuning.HOST_MS and 0.5 * total_ms <= counts[1] * one <= 1.5 * total_ms)


def test_choices_of_other_cases_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, dict(zip(CANDIDATES, (3.0, 1.0, 2.0), strict=True)))
    for case in (("fwd", 64), ("dq", 64), ("fwd", 128)):
        tuning.tune(case, CANDIDATES, print, DEVICE)
    assert len(tuning.KEPT.read()) == 3


@pytest.mark.parametrize(
    "text",
    [
        "{not json",
        "[1, 2]",
        '{"key": {"block": 3}}',
        '{"key": 7}',
        f'{{"key": {TILE}, "key": {TILE}}}',
        pytest.param("[" * 10**5, id="nested too deep"),
        *(f'{{"key": {TILE.replace("64", size, 1)}}}' for size in ('"x"', "1000000000", "0", "1.5", "true")),
    ],
)
def test_a_corrupt_cache_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, dict.fromkeys(CANDIDATES, 1.0))
    tuning.KEPT.path.parent.mkdir(parents=True, exist_ok=True)
    tuning.KEPT.path.write_text(text)
    with pytest.raises(ValueError, match="tuned choices are corrupt") as error:
        tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE)
    assert str(tuning.KEPT.path) in str(error.value)


def test_an_answer_that_could_not_be_read_again_is_not_added() -> None:
    """`add` takes the object that the file will hold, and not the tile itself."""
    with pytest.raises(ValueError, match=r"a tile must be an object with block_q, .*; got Tile\(block_q=64"):
        tuning.KEPT.add("key", CANDIDATES[0])
    assert not tuning.KEPT.path.exists()
    tuning.KEPT.path.write_text("[]")
    with pytest.raises(ValueError, match=f"{tuning.KEPT.path}: it must be an object; got \\[\\]"):
        tuning.KEPT.add("key", asdict(CANDIDATES[0]))


def test_a_cache_that_cannot_be_written_stops_no_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LMSYS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    timed = clock(monkeypatch, dict(zip(CANDIDATES, (3.0, 1.0, 2.0), strict=True)))
    with pytest.warns(UserWarning, match="tuned choices last for this process only"):
        assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == CANDIDATES[1]
    assert tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE) == CANDIDATES[1] and len(timed) == len(CANDIDATES)


def test_no_tile_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, dict.fromkeys(CANDIDATES, float("inf")))
    with pytest.raises(RuntimeError, match="no tile of"):
        tuning.tune(("fwd", 64), CANDIDATES, print, DEVICE)


def test_a_tile_that_does_not_fit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Tile] = []

    def launch(tile: Tile) -> None:
        if tile == CANDIDATES[0]:
            raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(tuning, "_time", lambda tile, launch, total_ms: float(timed.append(tile) or 1))
    assert tuning.tune(("fwd", 64), CANDIDATES[:2], launch, DEVICE) == CANDIDATES[1] == timed[0]


@pytest.mark.gpu
def test_a_kernel_is_timed_once_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmsys.attention.flash_triton import flash_triton

    monkeypatch.setattr("lmsys.attention.flash_triton._launches", {})
    timed: list[Tile] = []
    real = tuning._time
    monkeypatch.setattr(tuning, "_time", lambda tile, *rest: timed.append(tile) or real(tile, *rest))
    monkeypatch.setattr("lmsys.attention.flash_triton.tune", tuning.tune)  # in place of the fixture `any_tile`
    q, k, v = torch.randn(3, 1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    expected = tuning.candidates("fwd", q.dtype, 64, "ieee")
    first = flash_triton(q, k, v, causal=True)
    assert tuple(timed[: len(expected)]) == expected  # those that are near the best are then timed once more
    count = len(timed)
    (key,) = tuning.KEPT.read()
    assert torch.cuda.get_device_name() in key and "bfloat16" in key
    monkeypatch.setattr(tuning, "_chosen", {})  # as a later process finds it
    monkeypatch.setattr("lmsys.attention.flash_triton._launches", {})
    assert torch.equal(flash_triton(q, k, v, causal=True), first) and len(timed) == count
