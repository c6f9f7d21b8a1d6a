"""Measures what a callable costs, in time, memory and energy, and describes the machine. Knows no kernel."""
