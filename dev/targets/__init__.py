"""`python -m dev.targets`: what a Triton kernel becomes on each card, by its compiler alone. Nothing runs on a GPU.

`__main__.py` prints the answers, `answers.py` asks for them in a process for each card, `recording.py` records the
launches and compiles them, `binary.py` reads the binaries, and `cards.py` lists the cards; a new card is a line there.
"""
