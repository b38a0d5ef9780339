"""Imported only by the server that processes are forked from: unblocks stop signals in its forks.

launch/forked.py starts the server with those signals blocked; all forked processes inherit that, also those that other
parts of a program fork from it. The server imports this module first, which registers the unblocking, and turns the
garbage collector off until all modules are imported (launch/settled.py).
"""

import gc
import os
import signal

from tightfit.launch.forked import STOPPING

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING))
gc.disable()
