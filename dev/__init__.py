"""Tools of maintainers, which no sweep and no user's command runs; each is started by `python -m dev.NAME`.

`deliverables` writes the answers to CS336's problems. `durations` and `layouts` renew committed data. `earlier`
compares kernels and training steps with an earlier commit. `figures` writes the figures of pages. `steps` compares
versions of a training step. `targets` compiles kernels for other GPUs. `bench_plans.py` is a benchmark for pytest. A
new tool is a file or folder here.
"""
