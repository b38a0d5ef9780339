"""For the server that processes are forked from, and for nobody else: the last module that it imports.

What it has imported is set aside from garbage collection. A full collection writes to every object it looks at: in each
forked process it took 0.4 s of a core to look at torch and the training loop, and copied the pages of it that processes
share. The collector does nothing while the server imports (launch/reachable.py), as nothing of that is garbage.
"""

import atexit
import gc

gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # of the server: extensions complain of what is left when Python ends
