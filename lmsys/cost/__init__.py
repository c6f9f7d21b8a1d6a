"""Costs computed from shapes alone: operations, memory, communication. Imports no torch.

Benchmarks, reports and training call these functions.
"""
