"""Costs computed from shapes alone: operations, memory, communication. Imports no torch.

Benchmarks, reports and training call these functions: operations.py counts work, memory.py predicts the memory of a
training step, communication.py the time of collectives.
"""
