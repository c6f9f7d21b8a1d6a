"""`python -m dev.newton_schulz 1600x6400 4096x4096` times Muon's iteration by its kernels and by torch's compiler.

Muon is an optimizer that makes its updates nearly orthogonal, by five steps of the Newton-Schulz iteration. A shape is
RxC, or NxRxC for N matrices. For each shape a line is printed: the milliseconds of the five steps in bfloat16, for each
way to compute them (the median of calls; the ways take turns, as rows of a benchmark do); the error of each way
relative to the result in float64, in root mean square; and the time of the compiled way over that of our kernels.
`--max-autotune` adds another compiled way, which takes about a minute to compile for each shape; the faster of the two
then counts. A new way is an item of `ways` in `line_of`, whose docstring says how it counts.
"""

import argparse
import statistics

import torch

from lmsys.measure.clock import clock_of
from lmsys.measure.compare import interleave
from lmsys.measure.step import Step
from lmsys.training.muon import newton_schulz, normalized


def shape(text: str) -> tuple[int, ...]:
    """(N, R, C) of RxC or NxRxC; ValueError for other texts."""
    *count, rows, columns = map(int, text.split("x"))
    return *(count or [1]), rows, columns


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dev.newton_schulz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", type=shape, metavar="SHAPE", help="RxC or NxRxC")
    parser.add_argument("--max-autotune", action="store_true", help="torch's compiler times kernels, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it times kernels on a CUDA device; here is none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for sizes in options.shapes:
        print(f"{sizes}: {line_of(sizes, options.max_autotune)}", flush=True)


def line_of(sizes: tuple[int, ...], max_autotune: bool) -> str:
    """Times and errors for N random matrices (R, C), as text.

    sizes         (N, R, C)
    max_autotune  True: also times torch's compiler with its mode "max-autotune-no-cudagraphs"

    The text has a time and an error for every item of `ways`. At its end, "compiled over ours" is the least time of all
    ways but the one named "ours", over the time of that one. So a new way counts as compiled there, whatever it is.
    """
    torch.compiler.reset()
    ways = {
        "ours": newton_schulz,
        "compiled": torch.compile(newton_schulz, dynamic=False),  # while it is traced, it calls torch's matmuls
    }
    if max_autotune:
        ways["max-autotune"] = torch.compile(newton_schulz, dynamic=False, mode="max-autotune-no-cudagraphs")
    x = normalized(list(torch.randn(sizes, device="cuda")), torch.bfloat16)
    exact = newton_schulz(x.double())
    errors = {name: ((way(x) - exact).norm() / exact.norm()).item() for name, way in ways.items()}
    steps = {name: Step(way, lambda: x) for name, way in ways.items()}
    samples = interleave(steps, clock_of("cuda"), seconds=1.0, min_rounds=20).samples
    ms = {name: 1e3 * statistics.median(seconds) for name, seconds in samples.items()}
    words = "; ".join(f"{name} {t:.3f} ms, error {errors[name]:.2%}" for name, t in ms.items())
    return f"{words}; compiled over ours {min(t for name, t in ms.items() if name != 'ours') / ms['ours']:.2f}"


if __name__ == "__main__":
    main()
