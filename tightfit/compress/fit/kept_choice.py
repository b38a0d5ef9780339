"""Bits by layer that `--fit` has chosen, kept in the cache, so that a killed run resumes with exactly the same choice.

Measuring sensitivities takes minutes, and sums differ in the last bit from one run to the next where threads or a GPU
add in another order: a second measurement could lead to another choice, for which finished layers would be of no use.
The file's name is a digest of everything that the choice depends on.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.compress.fit.bit_choice import LEAST_WIDTHS, PLAIN_BITS, BitChoice, units
from tightfit.durable import refuse_unwritable, write_text
from tightfit.errors import UserError
from tightfit.models.spec import ModelSpec

REMEDY = "make room, or name another --cache"


class KeptChoice:
    """The file in `cache` for the choice that depends on `facts` (weights, rows, budget, …)."""

    def __init__(self, cache: Path, spec: ModelSpec, facts: Mapping[str, object]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.file, self.spec = cache.expanduser() / f"fit-{digest[:32]}.json", spec

    def read(self) -> BitChoice | None:
        """The choice of an earlier run; None where there is none or its file is damaged."""
        if not self.file.exists():
            return None
        try:
            found = read_json(self.file, LARGEST_RECORD_BYTES, "a choice of bits", remedy="it is made anew")
            choice = BitChoice(dict(found["bits"]), int(found["bytes"]), float(found["loss"]))
        except (UserError, KeyError, TypeError, ValueError):
            return None
        names_all = choice.bits.keys() == units(self.spec).keys()
        return choice if names_all and set(choice.bits.values()) <= {*LEAST_WIDTHS, PLAIN_BITS} else None

    def write(self, choice: BitChoice) -> None:
        """Keep `choice`."""
        refuse_unwritable(self.file.parent, self.file)
        write_text(self.file, json.dumps(asdict(choice)) + "\n", remedy=REMEDY)
