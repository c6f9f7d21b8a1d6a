"""Tools of maintainers, which no sweep and no user's command runs; each is started by `python -m dev.NAME`.

`deliverables` writes the answers to CS336's problems (by `on_paper.py` and `paper_formulas.py`). `durations` and
`layouts` renew committed data. `earlier` compares kernels and training steps with an earlier commit. `figures` writes
the measured numbers of pages. `newton_schulz` times the iteration of the optimizer Muon. `steps` compares versions of a
training step. `targets` compiles kernels for other GPUs. `bench_plans.py` (with `plan_cases.py`) is a benchmark, which
pytest runs. A new tool is a file or folder here.
"""
