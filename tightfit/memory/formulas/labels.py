"""Label: what a number of a moment means."""

from typing import NamedTuple

from tightfit.memory.ledger import Component


class Label(NamedTuple):
    """Component, kind and source of one number."""

    component: Component
    detail: str
    why: str
