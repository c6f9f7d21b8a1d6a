"""Extreme inputs: values that training has and a normal draw does not, such as attention sinks and huge gradients.

There is a module for each family of benchmarks; `lmsys check` and the benchmarks write these values into their draws.
All are made by exact operations, so that any machine makes the same bits again.
"""

BEFORE = "philox4x32-10/1"  # the `lmsys.draws.VERSION` from before draws had extreme parts; old records name it


def has_extremes(generator: str) -> bool:
    """True if a record's draws had extreme parts. `generator` is the one that the record names."""
    return generator != BEFORE
