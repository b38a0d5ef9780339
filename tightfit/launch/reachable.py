"""For the server that processes are forked from, and for nobody else: what it forks gets the signals it does not.

launch/forked.py starts the server with those signals blocked, which forked processes inherit, also those that other
parts of a program have it fork. It imports this module first, which sees to it that none of them stays deaf; and that
the garbage collector waits until all is imported (launch/settled.py).
"""

import gc
import os
import signal

from tightfit.launch.forked import STOPPING

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING))
gc.disable()
