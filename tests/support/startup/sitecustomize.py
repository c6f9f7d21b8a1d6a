"""Python imports this file at startup in processes that tests start: garbage is collected less often, and not at exit.

Importing torch makes a million objects that live as long as the process. Looking through them for garbage takes a
quarter of the import's time.
"""

import atexit
import gc

gc.set_threshold(100_000)  # new objects between two collections; the default is 700
atexit.register(gc.freeze)
