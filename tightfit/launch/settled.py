"""Imported only by the server that processes are forked from, as its last module.

It excludes all imported objects from garbage collection (gc.freeze). A full collection writes to every object it looks
at: in each forked process it took 0.4 s of a core to look at torch and the training loop, and copied their shared
pages. The collector is off while the server imports (launch/reachable.py), as imports leave no garbage.
"""

import atexit
import gc

gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # in the server: extensions complain of objects left when Python exits
