"""Attention for Hopper (sm_90) in Triton's Gluon dialect: warp-specialised, loads by TMA, matmuls by wgmma.

`kernels.py` holds the row and its launchers; `forward.py`, `preprocess.py` and `backward.py` with `backward_steps.py`
and `dq.py` the kernels; `intervals.py` what a mask, windows and documents hide;
`hopper.py` instructions of the hardware; `plans.py` the settings as data, and why each won. Importing this package
imports none of them: the table still has its row, with the reason, where Triton is missing.
"""
