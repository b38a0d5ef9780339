"""Every layout of quantized weights, by the name that `quant_method` in config.json gives it."""

from tightfit.errors import UserError
from tightfit.models.quantized.described import Config
from tightfit.models.quantized.formats.awq import Awq
from tightfit.models.quantized.formats.bitsandbytes import BitsAndBytes
from tightfit.models.quantized.formats.compressed_tensors import CompressedTensors
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.gptq import Gptq
from tightfit.models.quantized.formats.own import Own

FORMATS: dict[str, type[FileFormat]] = {
    found.name: found for found in (CompressedTensors, Gptq, Awq, BitsAndBytes, Own)
}


def format_of(config: Config, source: str) -> FileFormat:
    """The layout that a quantization_config describes."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise UserError(
            f"{source} is quantized by {method!r:.80}, which is not read; layouts that are: {', '.join(FORMATS)}, GGUF"
        )
    if method == "gptq":
        return Gptq(zeros_minus_one=config.get("checkpoint_format", "gptq") != "gptq_v2")
    return FORMATS[method]()
