"""What all Triton and Gluon kernels share: how they are launched, and how they become operators of torch."""
