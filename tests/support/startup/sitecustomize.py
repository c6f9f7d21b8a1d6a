"""An interpreter that tests start looks for garbage less often, and not at all as it ends.

Modules make much that lives as long as they do, torch's a million objects: to look through them takes a quarter of the
time in which they are imported.
"""

import atexit
import gc

gc.set_threshold(100_000)  # of new objects, in place of 700
atexit.register(gc.freeze)
