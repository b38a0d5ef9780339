"""Text as it grows: whole characters, and stop strings wherever they fall between tokens."""

import pytest

from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.requests.text_stream import TextStream
from tightfit.serve.running import Running
from tightfit.serve.schedule.sequence import Sequence

TEXT = "hello 日本 👍🏽 stop here, the end"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], 270)


def streamed(tokenizer: Tokenizer, text: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    stream, pieces = TextStream(tokenizer, stops), []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], False


def test_pieces_are_whole_characters_and_add_up(byte_tokenizer: Tokenizer) -> None:
    pieces, stopped = streamed(byte_tokenizer, TEXT, ())
    assert "".join(pieces) == TEXT
    assert not stopped
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 10


@pytest.mark.parametrize("stop", ["stop here", "本 👍", " 日", "end", "h", "the end"])
def test_a_stop_string_ends_it_wherever_tokens_begin(byte_tokenizer: Tokenizer, stop: str) -> None:
    pieces, stopped = streamed(byte_tokenizer, TEXT, (stop, "not in it"))
    assert stopped
    assert "".join(pieces) == TEXT[: TEXT.index(stop)]


def test_what_only_began_like_a_stop_string_is_shown_in_the_end(byte_tokenizer: Tokenizer) -> None:
    pieces, stopped = streamed(byte_tokenizer, TEXT, ("the endless", "hello 日本!"))
    assert not stopped
    assert "".join(pieces) == TEXT


def test_the_first_of_several_stop_strings_counts(byte_tokenizer: Tokenizer) -> None:
    assert "".join(streamed(byte_tokenizer, TEXT, ("end", "stop", "here"))[0]) == TEXT[: TEXT.index("stop")]


def test_broken_bytes_are_shown_in_the_end(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer)
    half = byte_tokenizer.encode("👍")[:1]
    assert stream.push(half[0]) == ""
    assert stream.finish() != ""


def test_a_stop_string_that_only_the_last_token_allowed_shows_is_why_it_is_over() -> None:
    tokenizer = train_tokenizer(["né nè nê " * 4], 260)  # one merge: n and the byte that those letters begin with
    token = tokenizer.encode("né")[0]
    assert tokenizer.decode([token]) == "n\ufffd"
    for stop, text, why in (("n", "", "stop"), ("m", "n\ufffd", "length")):
        sampling = Sampling(max_tokens=1, stop=(stop,))
        stream, sequence = TextStream(tokenizer, (stop,)), Sequence([0], sampling)
        running = Running(Request(id="a", prompt=[0], sampling=sampling), sequence, stream, None)
        assert running.extend([token]) == ([token], text, why)
