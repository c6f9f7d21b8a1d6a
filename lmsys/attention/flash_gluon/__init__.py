"""Attention for Hopper (sm_90) in Triton's Gluon dialect: warp-specialised, loads by TMA, matmuls by wgmma.

`kernels.py` holds the row and its launchers, `forward.py` and `backward.py` the kernels, `hopper.py` what they
need of the hardware, `plans.py` the settings as data and why each won, `tune.py` the sweep that finds them.
Importing this package imports none of them: where Triton lacks, the table still says so.
"""
