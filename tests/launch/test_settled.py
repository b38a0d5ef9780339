"""What the server of forked processes has imported is nobody's garbage, and what they make themselves is collected."""

import gc
import json
import weakref
from pathlib import Path

from tests.programs import call_forked


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def tell() -> None:
    """How many objects are set aside, how many are looked at, and whether a cycle is found."""
    looked_at = len(gc.get_objects())
    known = weakref.ref(Cycle())
    gc.collect()
    print(json.dumps([gc.isenabled(), gc.get_freeze_count(), looked_at, known() is None]))


def test_forked_processes_look_at_their_own_objects_only(tmp_path: Path) -> None:
    code, said, told = call_forked(tmp_path, tell)
    assert code == 0, told
    enabled, set_aside, looked_at, collected = json.loads(said)
    assert enabled
    assert collected
    assert set_aside > 100_000 > 5 * looked_at, "torch alone has more"
