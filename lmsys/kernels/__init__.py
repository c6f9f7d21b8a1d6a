"""Code that all Triton and Gluon kernels share: how they are launched, and how they become custom operators."""
