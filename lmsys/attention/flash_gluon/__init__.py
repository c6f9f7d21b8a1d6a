"""Attention for Hopper (sm_90) in Triton's Gluon dialect: warp-specialised, loads by TMA, matmuls by wgmma.

- `launch.py` holds the row (the implementation that `lmsys/attention/table.py` names) and launches its kernels. Read it
  first.
- `forward.py`, `preprocess.py`, and `backward.py` with `backward_steps.py` and `dq.py`, hold the kernels.
- `intervals.py` says which keys causal order, windows and documents hide; `hopper.py` has instructions of the hardware.
- `plans.py` has the settings as data, and the reason for each. Change a setting there.
- `support.py` says which cases (calls) the row runs. `selftest.py` tries the row on versions of Triton on which it has
  not been tested.

Importing this package imports none of these files. So without Triton the table can still list the row, and say why it
cannot run.
"""
