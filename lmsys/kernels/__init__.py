"""Code that all Triton and Gluon kernels share.

`launch.py` launches kernels, `custom_op.py` registers them as operators of torch, `interpreter.py` speeds up Triton's
interpreter. `tritons.py` lists the versions of Triton that were tested, and `trial.py` tries a kernel on any other. For
a new version of Triton begin in `tritons.py`.
"""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
