"""Measures the time, memory and energy that a callable takes, and describes the machine.

`lmsys.bench` and benchmarks call these modules. step.py defines the call that is timed, clock.py times one call, and
compare.py samples several side by side. No module here depends on what the callables compute.
"""
