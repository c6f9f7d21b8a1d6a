"""Attention for Hopper (sm_90) in Triton's Gluon dialect: warp-specialised, loads by TMA, matmuls by wgmma.

`launch.py` holds the row and launches its kernels. `forward.py`, `preprocess.py`, and `backward.py` with
`backward_steps.py` and `dq.py`, hold the kernels; `intervals.py` says which keys a mask, windows and documents hide;
`hopper.py` has instructions of the hardware. `plans.py` has the settings as data, and why each won; `support.py` says
which cases the row runs, and `selftest.py` tries it on a Triton that nobody has tried. Importing this package imports
none of them: the table still has its row, with the reason, where Triton is missing.
"""
