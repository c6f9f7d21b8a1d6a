"""Inputs as training has them and a normal draw has not: what is drawn for each family, in one place."""

BEFORE = "philox4x32-10/1"  # `lmsys.draws.VERSION` in records of draws without extreme parts


def has_extremes(generator: str) -> bool:
    """True where a record's draws had extreme parts, by the generator that its proof names."""
    return generator != BEFORE
