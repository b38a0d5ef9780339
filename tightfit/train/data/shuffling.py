"""One reproducible order per seed and purpose, the same on every platform, numpy version and process.

Keys come from PCG64's raw stream, which numpy promises never to change (`permutation` may change); sorting the keys is
the shuffle. The purpose is part of the seed, so that the held-out choice and the order of an epoch are independent.
"""

import hashlib

import numpy as np


def shuffled(count: int, seed: int, purpose: str) -> np.ndarray:
    """The numbers 0 … count − 1 in an order decided by `seed` and `purpose`."""
    entropy = int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest())
    return np.argsort(np.random.PCG64(entropy).random_raw(count), kind="stable")
