"""This machine's own rates, as `tightfit calibrate` and `tightfit doctor` measured them, in a file of the user's.

The file is `$XDG_CONFIG_HOME/tightfit/calibration.json` (`~/.config` where that is not set), one entry per device name.
`--on local` and `--fit` use the entry of the card they find; without one they assume the shares of peak rates in
sustained.py. Stored are the rates that the machine reached, not shares of a data sheet.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.durable import write_text
from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator
from tightfit.hardware.collective_rates import CollectiveRates
from tightfit.hardware.cpu_rates import CpuRates
from tightfit.hardware.efficiency import MEASURED, Efficiency, Shares

FORMAT = 1
RATES = ("copy_gb_s", "link_gb_s", "link_both_ways", "host_adam_params_s")
TIMES = ("product_us", "layer_launch_ms")
"""Measured times, which may be 0; RATES must be above."""
CPU = "cpu"
"""The device name of a machine without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates of one device and its host."""

    device: str
    date: str
    products_tflop_s: Mapping[str, float]
    """Sustained rate of matrix products that follow one another, by number format."""
    product_us: float
    """Fixed time of one product."""
    attention_tflop_s: Mapping[str, tuple[float, float]]
    """Causal attention, forward and backward, by number format."""
    copy_gb_s: float
    """Bytes read plus bytes written by a copy on the device."""
    link_gb_s: float
    """Rate of a pinned copy from the host."""
    link_both_ways: float
    """Rate of each of two simultaneous copies in opposite directions, as a share of one alone."""
    host_adam_params_s: float
    layer_launch_ms: float
    """The host's time to launch a plain layer, forward and backward."""
    versions: Mapping[str, str] = field(default_factory=dict)
    collectives: CollectiveRates | None = None
    """Exchanges between all devices of this machine; None until `tightfit doctor` has measured them."""
    serving: CpuRates | None = None
    """Rates of serving on a CPU; None on a GPU."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Calibration":
        """The calibration from `to_json`'s data; ValueError where a rate is no number."""
        attention = {name: (float(pair[0]), float(pair[1])) for name, pair in data["attention_tflop_s"].items()}
        kept = data.get("collectives")
        collectives = None if kept is None else CollectiveRates.from_json(kept)
        if collectives is not None:
            collectives.peer_rates()  # fails unless every operation was measured
        parts = data.get("serving")
        serving = None if parts is None or not CpuRates.is_whole(parts) else CpuRates.from_json(parts)
        found = cls(**{**data, "attention_tflop_s": attention, "collectives": collectives, "serving": serving})
        found._check_rates()
        return found

    def _check_rates(self) -> None:
        rates = {f"products_tflop_s {number}": rate for number, rate in self.products_tflop_s.items()}
        rates |= {f"attention_tflop_s {number}": min(pair) for number, pair in self.attention_tflop_s.items()}
        rates |= {name: getattr(self, name) for name in (*RATES, *TIMES)}
        for name, rate in rates.items():
            least = 0.0 if name in TIMES else math.ulp(0.0)
            if type(rate) not in (int, float) or not least <= rate < math.inf:
                raise ValueError(f"{name} is {rate!r}")

    def efficiency(self, card: Accelerator) -> Efficiency:
        """The measured rates as shares of the card's peaks, the form that cost models use."""
        return replace(
            MEASURED,
            narrow=self._shares(card, MEASURED.narrow, ("bf16", "fp16")),
            wide=self._shares(card, MEASURED.wide, ("fp32",)),
            matmul=self._share(card, ("bf16", "fp16")) or MEASURED.matmul,
            bandwidth=self.copy_gb_s / card.bandwidth_gb_s,
            fp8_tensor=self._share(card, ("fp8",)) or MEASURED.fp8_tensor,
            fp8_tensor_wide=self._share(card, ("fp8",)) or MEASURED.fp8_tensor_wide,
            fp8_row=self._share(card, ("fp8",)) or MEASURED.fp8_row,
            link_both_ways=self.link_both_ways,
            host_adam_params_s=self.host_adam_params_s,
        )

    def _share(self, card: Accelerator, numbers: tuple[str, ...]) -> float | None:
        """Share of the peak of the first of `numbers` that was measured and has a known peak; None without."""
        for number in numbers:
            peak = getattr(card.rates, number)
            if number in self.products_tflop_s and peak:
                return self.products_tflop_s[number] / peak
        return None

    def _shares(self, card: Accelerator, other: Shares, numbers: tuple[str, ...]) -> Shares:
        products = self._share(card, numbers)
        if products is None:
            return other
        number = next(each for each in numbers if each in self.products_tflop_s and getattr(card.rates, each))
        forward, backward = self.attention_tflop_s.get(number, (0.0, 0.0))
        peak = getattr(card.rates, number)
        attention = replace(
            other.attention,
            forward=((64, forward / peak),) if forward else other.attention.forward,
            backward=((64, backward / peak),) if backward else other.attention.backward,
        )
        return replace(other, products=products, product_s=self.product_us * 1e-6, attention=attention)


def calibration_path() -> Path:
    """The path of the user's calibration file."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "tightfit" / "calibration.json"


def read_calibrations(path: Path | None = None) -> dict[str, Calibration]:
    """Every entry by device name; empty where there is no file."""
    path = path or calibration_path()
    if not path.exists():
        return {}
    remedy = "remove it, and make it anew with `tightfit calibrate`"
    data = read_json(path, LARGEST_RECORD_BYTES, "a calibration", remedy=remedy)
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r} instead of {FORMAT}")
        return {name: Calibration.from_json(entry) for name, entry in data["devices"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} is not a calibration ({error}); {remedy}") from None


def write_calibration(found: Calibration, path: Path | None = None) -> Path:
    """Add or replace the entry of `found`'s device; other devices' stay, and so do collectives if not measured anew."""
    path = path or calibration_path()
    before = read_calibrations(path)
    if found.collectives is None and found.device in before:
        found = replace(found, collectives=before[found.device].collectives)
    entries = {**before, found.device: found}
    text = json.dumps({"format": FORMAT, "devices": {name: each.to_json() for name, each in entries.items()}}, indent=1)
    write_text(path, text + "\n", remedy="set XDG_CONFIG_HOME to another place")
    return path
