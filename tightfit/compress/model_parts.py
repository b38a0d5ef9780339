"""A model in parts: embedding, head or one layer in memory, each read from the source when its turn comes.

The files are found once: a training run that goes on meanwhile writes newer checkpoints, and parts of two checkpoints
must not be mixed. Checksums are compared once too, as comparing them for every part would read all files again.
"""

from pathlib import Path

import torch

from tightfit.compress.rounding.rotation import Rotation
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.loading import digest_of, load_into, source_spec, verify_source, weights_path
from tightfit.models.saving import require_float16
from tightfit.parallel.pipeline_stage import StageSpan, drop_other_stages

NOT_DIVERGED = "take a model that was saved before its training diverged"


class ModelParts:
    """The model at `source`, rotated where a rotation is given. Parts are float32."""

    def __init__(self, source: str, device: torch.device, rotation: Rotation | None = None) -> None:
        path = weights_path(source).absolute()  # `./name` stays a directory where a preset has that name
        self.name, self.source, self.device, self.rotation = source, str(path), device, rotation
        self.spec = source_spec(self.source)
        verify_source(self.source)

    def fingerprint(self) -> dict[str, str]:
        """Path and digest of the weights: equal where two runs compress the same model."""
        return {"model": str(Path(self.source).resolve()), "weights": digest_of(self.source)[:16]}

    def layer(self, index: int) -> Decoder:
        """A decoder that has layer `index` only."""
        model = self._part(StageSpan(1, 3, index, index + 1))
        if self.rotation is not None:
            self.rotation.turn_layer(model.layers._modules[str(index)])  # type: ignore[arg-type]
        return model

    def embedding(self) -> Decoder:
        """A decoder that has its embedding (and what is tied to it) only."""
        model = self._part(StageSpan(0, 2, 0, 0))
        if self.rotation is not None:
            self.rotation.turn_embedding(model)
            model.head = None  # type: ignore[assignment]
        return model

    def head(self) -> Decoder:
        """A decoder that has its final norm and output projection only."""
        layers = self.spec.layers
        model = self._part(StageSpan(1, 2, layers, layers))
        if self.rotation is not None:
            self.rotation.turn_head(model)
        if self.rotation is not None and self.spec.tied:
            model.embed = None  # type: ignore[assignment]
        return model

    def _part(self, piece: StageSpan) -> Decoder:
        model = blank_decoder(self.spec, "meta", torch.float32)
        drop_other_stages(model, [piece])
        model.to_empty(device=self.device)
        if self.spec.tied and model.head is not None and model.embed is not None:
            model.head.weight = model.embed.weight
        load_into(model, self.source, verified=False)
        require_float16(model, self.name, NOT_DIVERGED)
        return model
