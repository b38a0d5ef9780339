"""The base model of a run that trains adapters: frozen, in the format it keeps for the whole run, adapters attached.

A compressed directory stays packed. A plain model that is to be held in few bits is loaded on the host, and quantized
on the device one matrix after another: the device never holds more than one matrix unquantized.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from tightfit.jobs.job import Job, PrecisionName
from tightfit.levers.adapter import adapters, attach, initialise, restore
from tightfit.models.adapted import read_matrices
from tightfit.models.base_model import BaseModel
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import load_frozen, verify_weights
from tightfit.models.quantized.holding import hold_in_codes
from tightfit.models.spec import ModelSpec
from tightfit.train.assembly import Fill
from tightfit.train.checkpoints.damage import damage_told
from tightfit.train.checkpoints.directory import SavedAdapter
from tightfit.train.checks import CheckedRun, wants_weights
from tightfit.train.precision import COMPUTE_DTYPES, keeps_master_weights


def frozen_model(checked: CheckedRun) -> tuple[Decoder, Fill]:
    """The frozen model with adapters, and the function that initialises or restores the adapters."""
    job, dtype = checked.job, COMPUTE_DTYPES[checked.precision]
    model = _held(job, checked.spec, checked.device, dtype)
    attach(model, job.adapter, torch.float32 if keeps_master_weights(checked.precision) else dtype)

    def fill(model: Decoder) -> None:
        torch.manual_seed(job.seed)
        if checked.checkpoint is None:
            initialise(model, job.seed)
        else:
            with damage_told(checked.checkpoint):
                verify_weights(checked.checkpoint)
            saved = read_matrices(checked.checkpoint, model.spec, adapters(model))
            restore(model, saved, str(checked.checkpoint))

    return model, fill


def _held(job: Job, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The frozen weights on `device`."""
    scheme = job.adapter.held
    if wants_weights(job):
        place = device if scheme is None else torch.device("cpu")
        model = load_frozen(job.model.source, device=place, dtype=dtype)
    else:
        model = blank_decoder(spec, device, dtype)
        torch.manual_seed(job.seed)
        init_weights(model, device=device)
    if scheme is not None:
        hold_in_codes(model, scheme, device)
    return model.to(device)


def saved_adapter(job: Job, facts: Mapping[str, Any], precision: PrecisionName) -> SavedAdapter | None:
    """What a checkpoint records of the run's adapters and their base model; None where the whole model is trained."""
    scheme = job.adapter.held
    if job.adapter.rank is None:
        return None
    base = BaseModel(
        source=job.model.source,
        digest=facts["base"],
        scheme=None if scheme is None else asdict(scheme),
        dtype=str(COMPUTE_DTYPES[precision]).removeprefix("torch."),
    )
    return SavedAdapter(job.adapter, base)
