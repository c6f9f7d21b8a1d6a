"""Attention for Hopper (sm_90) in Triton's Gluon dialect: warp-specialised, loads by TMA, matmuls by wgmma.

- `launch.py` holds the row and launches its kernels. Read it first.
- `forward.py`, `preprocess.py`, and `backward.py` with `backward_steps.py` and `dq.py`, hold the kernels.
- `intervals.py` says which keys causal order, windows and documents hide; `hopper.py` has instructions of the hardware.
- `plans.py` has the settings as data, and why each won. Change a setting there.
- `support.py` says which cases the row runs. `selftest.py` tries it on a version of Triton that it was not tested on.

Importing this package imports none of them, so that the table can list the row, and why it cannot run, without Triton.
"""
