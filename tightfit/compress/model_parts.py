"""A model in parts: its ends or one of its layers in memory, read from the source when its turn comes."""

import torch

from tightfit.compress.rotation import Rotation
from tightfit.models.blank import blank_decoder
from tightfit.models.decoder import Decoder
from tightfit.models.loading import load_into, source_spec
from tightfit.parallel.pipeline_stage import StageSpan, drop_other_stages


class ModelParts:
    """The model at `source`, rotated where a rotation is given. Parts are float32."""

    def __init__(self, source: str, device: torch.device, rotation: Rotation | None) -> None:
        self.source, self.device, self.rotation = source, device, rotation
        self.spec = source_spec(source)

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
        load_into(model, self.source)
        return model
