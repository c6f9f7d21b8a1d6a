"""`python -m dev.figures` writes the figures of README and docs from the committed runs: see `__main__.py`."""
