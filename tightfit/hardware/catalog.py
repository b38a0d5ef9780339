"""The catalog of accelerators, one row each with its source. Rates are dense; sparse ones, twice as high, are not used.
A name that is not here is an error that suggests near names.

`usable_gib` is the total in PyTorch's out-of-memory message on that card (public bug reports; the lowest where they
differ; for the H200 our own). Without it plans use the vendor's decimal gigabytes.
"""

import difflib
import re

from tightfit.errors import UserError
from tightfit.hardware.accelerator import Accelerator, Rates

_VOLTA = "NVIDIA V100 data sheet (2020)"
_AMPERE = "NVIDIA A100 data sheet (2021)"
_HOPPER = "NVIDIA H100 data sheet (2023)"
_V100_PCIE = Rates(fp32=14.0, fp16=112.0)
_V100_SXM = Rates(fp32=15.7, fp16=125.0)
_A100 = Rates(fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0, int8=624.0)
_H100_SXM = Rates(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9, int8=1978.9)

CATALOG: tuple[Accelerator, ...] = (
    Accelerator(
        family="T4",
        memory_gb=16,
        usable_gib=14.56,
        form="pcie",
        bandwidth_gb_s=320,
        rates=Rates(fp32=8.1, fp16=65.0, int8=130.0),
        host_link="pcie3",
        peer_link="pcie3",
        source="NVIDIA T4 data sheet (2019)",
    ),
    Accelerator(
        family="P100",
        memory_gb=16,
        usable_gib=15.89,
        form="sxm",
        bandwidth_gb_s=732,
        rates=Rates(fp32=10.6, fp16=21.2),
        host_link="pcie3",
        peer_link="nvlink1",
        network="edr",
        source="NVIDIA Tesla P100 data sheet (2016)",
        note="no matrix units: fp16 is twice the vector rate",
    ),
    Accelerator(
        family="P100",
        memory_gb=16,
        usable_gib=15.89,
        form="pcie",
        bandwidth_gb_s=732,
        rates=Rates(fp32=9.3, fp16=18.7),
        host_link="pcie3",
        peer_link="pcie3",
        source="NVIDIA Tesla P100 data sheet (2016)",
        note="no matrix units: fp16 is twice the vector rate",
    ),
    Accelerator(
        family="V100",
        memory_gb=16,
        usable_gib=15.77,
        form="sxm",
        bandwidth_gb_s=900,
        rates=_V100_SXM,
        host_link="pcie3",
        peer_link="nvlink2",
        network="edr",
        source=_VOLTA,
    ),
    Accelerator(
        family="V100",
        memory_gb=16,
        usable_gib=15.77,
        form="pcie",
        bandwidth_gb_s=900,
        rates=_V100_PCIE,
        host_link="pcie3",
        peer_link="pcie3",
        source=_VOLTA,
    ),
    Accelerator(
        family="V100",
        memory_gb=32,
        usable_gib=31.73,
        form="sxm",
        bandwidth_gb_s=900,
        rates=_V100_SXM,
        host_link="pcie3",
        peer_link="nvlink2",
        network="edr",
        source=_VOLTA,
    ),
    Accelerator(
        family="V100",
        memory_gb=32,
        usable_gib=31.73,
        form="pcie",
        bandwidth_gb_s=900,
        rates=_V100_PCIE,
        host_link="pcie3",
        peer_link="pcie3",
        source=_VOLTA,
    ),
    Accelerator(
        family="RTX3090",
        memory_gb=24,
        usable_gib=23.68,
        form="pcie",
        bandwidth_gb_s=936,
        rates=Rates(fp32=35.6, tf32=35.6, fp16=71.0, bf16=71.0, int8=284.0),
        host_link="pcie4",
        peer_link="pcie4",
        bridge="nvlink-bridge-56",
        source="NVIDIA Ampere GA102 architecture white paper (2021)",
    ),
    Accelerator(
        family="RTX4090",
        memory_gb=24,
        usable_gib=23.52,
        form="pcie",
        bandwidth_gb_s=1008,
        rates=Rates(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3, int8=660.6),
        host_link="pcie4",
        peer_link="pcie4",
        source="NVIDIA Ada GPU architecture white paper (2023)",
    ),
    Accelerator(
        family="RTX5090",
        memory_gb=32,
        usable_gib=31.36,
        form="pcie",
        bandwidth_gb_s=1792,
        rates=Rates(fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419.0, int8=838.0),
        host_link="pcie5",
        peer_link="pcie5",
        source="NVIDIA RTX Blackwell GPU architecture white paper (2025)",
    ),
    Accelerator(
        family="A10",
        memory_gb=24,
        usable_gib=21.99,
        form="pcie",
        bandwidth_gb_s=600,
        rates=Rates(fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0, int8=250.0),
        host_link="pcie4",
        peer_link="pcie4",
        source="NVIDIA A10 data sheet (2021)",
    ),
    Accelerator(
        family="A40",
        memory_gb=48,
        usable_gib=44.35,
        form="pcie",
        bandwidth_gb_s=696,
        rates=Rates(fp32=37.4, tf32=74.8, fp16=149.7, bf16=149.7, int8=299.3),
        host_link="pcie4",
        peer_link="pcie4",
        bridge="nvlink-bridge-56",
        source="NVIDIA A40 data sheet (2020)",
    ),
    Accelerator(
        family="L4",
        memory_gb=24,
        usable_gib=22.03,
        form="pcie",
        bandwidth_gb_s=300,
        rates=Rates(fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0, fp8=242.0, int8=242.0),
        host_link="pcie4",
        peer_link="pcie4",
        source="NVIDIA L4 data sheet (2023)",
    ),
    Accelerator(
        family="L40S",
        memory_gb=48,
        usable_gib=44.40,
        form="pcie",
        bandwidth_gb_s=864,
        rates=Rates(fp32=91.6, tf32=183.0, fp16=362.0, bf16=362.0, fp8=733.0, int8=733.0),
        host_link="pcie4",
        peer_link="pcie4",
        source="NVIDIA L40S data sheet (2023)",
    ),
    Accelerator(
        family="A100",
        memory_gb=40,
        usable_gib=39.39,
        form="sxm",
        bandwidth_gb_s=1555,
        rates=_A100,
        host_link="pcie4",
        peer_link="nvlink3",
        network="hdr",
        source=_AMPERE,
    ),
    Accelerator(
        family="A100",
        memory_gb=40,
        usable_gib=39.39,
        form="pcie",
        bandwidth_gb_s=1555,
        rates=_A100,
        host_link="pcie4",
        peer_link="pcie4",
        bridge="nvlink-bridge-300",
        source=_AMPERE,
    ),
    Accelerator(
        family="A100",
        memory_gb=80,
        usable_gib=79.14,
        form="sxm",
        bandwidth_gb_s=2039,
        rates=_A100,
        host_link="pcie4",
        peer_link="nvlink3",
        network="hdr",
        source=_AMPERE,
    ),
    Accelerator(
        family="A100",
        memory_gb=80,
        usable_gib=79.14,
        form="pcie",
        bandwidth_gb_s=1935,
        rates=_A100,
        host_link="pcie4",
        peer_link="pcie4",
        bridge="nvlink-bridge-300",
        source=_AMPERE,
    ),
    Accelerator(
        family="H100",
        memory_gb=80,
        usable_gib=79.10,
        form="sxm",
        bandwidth_gb_s=3350,
        rates=_H100_SXM,
        host_link="pcie5",
        peer_link="nvlink4",
        network="ndr",
        source=_HOPPER,
    ),
    Accelerator(
        family="H100",
        memory_gb=80,
        usable_gib=79.10,
        form="pcie",
        bandwidth_gb_s=2000,
        rates=Rates(fp32=51.0, tf32=378.0, fp16=756.0, bf16=756.0, fp8=1513.0, int8=1513.0),
        host_link="pcie5",
        peer_link="pcie5",
        bridge="nvlink-bridge-300",
        source=_HOPPER,
    ),
    Accelerator(
        family="H100",
        memory_gb=94,
        form="nvl",
        bandwidth_gb_s=3938,
        rates=Rates(fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5, int8=1670.5),
        host_link="pcie5",
        peer_link="pcie5",
        bridge="nvlink-bridge-300",
        source="NVIDIA H100 NVL product brief (2024)",
    ),
    Accelerator(
        family="H200",
        memory_gb=141,
        usable_gib=139.80,
        form="sxm",
        bandwidth_gb_s=4800,
        rates=_H100_SXM,
        host_link="pcie5",
        peer_link="nvlink4",
        network="ndr",
        source="NVIDIA H200 data sheet (2024)",
    ),
    Accelerator(
        family="GH200",
        memory_gb=96,
        form="sxm",
        bandwidth_gb_s=4000,
        rates=_H100_SXM,
        host_link="nvlink-c2c",
        peer_link="nvlink4",
        network="ndr",
        source="NVIDIA GH200 data sheet (2024)",
        note="the link to the host is NVLink-C2C",
    ),
    Accelerator(
        family="B200",
        memory_gb=180,
        usable_gib=178.35,
        form="sxm",
        bandwidth_gb_s=8000,
        rates=Rates(fp32=75.0, tf32=1125.0, fp16=2250.0, bf16=2250.0, fp8=4500.0, int8=4500.0),
        host_link="pcie5",
        peer_link="nvlink5",
        network="ndr",
        source="NVIDIA DGX B200 data sheet (2024), an eighth of it",
    ),
    Accelerator(
        family="MI250X",
        memory_gb=64,
        form="oam",
        bandwidth_gb_s=1638,
        rates=Rates(fp32=47.9, fp16=191.5, bf16=191.5, int8=191.5),
        host_link="pcie4",
        peer_link="infinity-fabric-200",
        network="hdr",
        source="AMD Instinct MI250X data sheet (2021), half of it",
        note="one of the two dies of a card, which is what PyTorch sees as a GPU: a card counts as two",
    ),
    Accelerator(
        family="MI300X",
        memory_gb=192,
        form="oam",
        bandwidth_gb_s=5300,
        rates=Rates(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9, int8=2614.9),
        host_link="pcie5",
        peer_link="infinity-fabric-448",
        network="ndr",
        source="AMD Instinct MI300X data sheet (2023)",
    ),
)
FORMS = tuple(dict.fromkeys(row.form for row in CATALOG))


def find_accelerator(name: str, form: str | None = None) -> Accelerator:
    """The row called `name` (`V100-32GB`; the size may be left out where there is only one), in `form` if given.

    Without `form` the first row is taken, which has the fastest links.
    """
    rows = [row for row in CATALOG if _same(name, row)]
    if len({row.memory_gb for row in rows}) > 1:
        sizes = " or ".join(dict.fromkeys(row.name for row in rows))
        raise UserError(f"accelerator {name!r} comes in several sizes; write {sizes}")
    if not rows:
        raise UserError(f"there is no accelerator {name!r} in the catalog; {_near(name)}")
    if form is None:
        return rows[0]
    for row in rows:
        if row.form == form:
            return row
    raise UserError(f"{rows[0].name} does not come as {form!r}; write {' or '.join(row.form for row in rows)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("amd")


def _same(name: str, row: Accelerator) -> bool:
    return _plain(name) in (_plain(row.family), _plain(row.name))


def _near(name: str) -> str:
    """Names of the families that are spelled like `name`, its size aside."""
    families = {_plain(row.family): row.family for row in CATALOG}
    asked = _plain(re.sub(r"[-_ ]\d+ ?gi?b$", "", name, flags=re.IGNORECASE))
    near = [families[each] for each in difflib.get_close_matches(asked, families, n=2, cutoff=0.5)]
    names = list(dict.fromkeys(row.name for row in CATALOG if not near or row.family in near))
    return f"did you mean {' or '.join(names)}?" if near else f"it has {', '.join(names)}"
