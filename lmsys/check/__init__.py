"""Is this attention kernel right, and if not, what is wrong with it? `python -m lmsys.check mine.py:f`."""
