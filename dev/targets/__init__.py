"""`python -m dev.targets mine.py:f` compiles Triton kernels for each card (kind of GPU) and says whether they fit.

Nothing runs on a GPU: the facts, such as registers, spills and shared memory, come from the compiled binaries.

`__main__.py` prints the answers, `answers.py` asks for them in a process for each card, `recording.py` records the
launches and compiles them there, `binary.py` reads the binaries, and `cards.py` lists the cards; a new card is a line
there.
"""
