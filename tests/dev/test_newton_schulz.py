"""`python -m dev.newton_schulz` times Muon's iteration by kernels and by torch's compiler, on a GPU."""

import re

import pytest
import torch

from dev.newton_schulz import main
from lmsys.training.muon import newton_schulz


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: see the gpu test")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["64x64"], ["64"], ["ax3"], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
    assert "it times kernels on a CUDA device" in capsys.readouterr().err


def test_what_it_compiles_are_torchs_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph. Under the compiler nothing asks whether there are kernels, on any device."""
    monkeypatch.delattr("lmsys.training.muon.HAS_TRITON")
    graphs = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    torch.compile(newton_schulz, fullgraph=True, dynamic=False, backend=compiler)(torch.eye(4)[None])
    assert [targets.count(torch.baddbmm) for targets in graphs] == [10]


@pytest.mark.gpu
def test_each_way_has_a_time_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    main(["2x1024x512"])
    _, line = capsys.readouterr().out.splitlines()
    way = r"\S+ \d+\.\d{3} ms, error \d\.\d\d%; "
    assert re.fullmatch(rf"\(2, 1024, 512\): ({way}){{2}}compiled over ours \d+\.\d\d", line)
