"""Costs on paper, from shapes: operations, memory, communication. Imports no torch."""
