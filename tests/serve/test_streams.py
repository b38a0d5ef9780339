"""Streams of one request, read one after the other, are its answers."""

from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.streams import text_streams

CONFIG = EngineConfig(max_sequences=4, step_tokens=32, block_size=4, cache_bytes=2**20)


def test_streams_are_the_answers(loaded: LoadedModel) -> None:
    request = Request(id="a", prompt=[5, 6, 7], sampling=Sampling(max_tokens=9, seed=2), count=3)
    wanted = Engine(loaded.model, loaded.tokenizer, CONFIG).generate([request])["a"]
    streams = text_streams(Engine(loaded.model, loaded.tokenizer, CONFIG), request)
    assert ["".join(stream) for stream in reversed(streams)] == [answer.text for answer in reversed(wanted)]
