"""Is this attention kernel right, and if not, what is wrong with it? `lmsys check mine.py:f`."""
