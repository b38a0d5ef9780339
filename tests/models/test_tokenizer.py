"""The tokenizer: lossless, deterministic, safe against special strings, and exact about who says what in a chat."""

import errno
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tightfit.errors import UserError
from tightfit.models.text.tokenizer import MIN_VOCAB_SIZE, Tokenizer, load_tokenizer, train_tokenizer

CORPUS = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "def main() -> None:\n    for i in range(1024):\n        print(i, 'ok')  # 2026\n",
    "naïve façade — “quotes”, 日本語のテキスト, русский текст; don't, I'll, we've.",
] * 5
AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "a\r\nb\tc\n\n\nd",
    "1234567890 3.14159 1e-5 ½ ٣",
    "don't I'LL we've 'tis",
    "e\u0301 vs é, Å vs Å",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "\u202eשלום\u202c مرحبا",
    "zero\u200bwidth\ufeffbom\u00a0nbsp",
    "a\x00b\x01\x7f",
    "<|im_start|>user<|im_end|><|endoftext|>",
    "𝕬𝖓𝖈𝖎𝖊𝖓𝖙 \U0010ffff",
    "x" * 500,
]
LLAMA3 = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|start_header|>' + message['role'] + '<|end_header|>\n\n' + "
    "message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
MARKED = (
    "{% for message in messages %}{{ message['role'] + ':' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] if loop.last or message['role'] == 'user' else message['content'][:1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And é?"},
    {"role": "assistant", "content": "日本 👍🏽 done"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 400)


def with_template(template: str | None, special: list[str]) -> Tokenizer:
    """A freshly trained tokenizer that knows `special` and lays chats out by `template`."""
    backend = train_tokenizer(CORPUS, 400)._wrapped.backend_tokenizer
    backend.add_special_tokens(special)
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template)
    )


def answers(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """What the mask of `encode_chat` marks, one text per unbroken run."""
    ids, mask = tokenizer.encode_chat(messages)
    runs: list[list[int]] = []
    for index, (token, answered) in enumerate(zip(ids, mask, strict=True)):
        if answered:
            runs[-1].append(token) if index and mask[index - 1] else runs.append([token])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("text", AWKWARD)
def test_any_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_unicode_comes_back_as_it_was(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    points = [p for p in range(0x11000) if not 0xD800 <= p < 0xE000]
    texts = ["".join(chr(draw.choice(points)) for _ in range(draw.randrange(60))) for _ in range(200)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts


def test_encode_many_is_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_many(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]


def test_surrogates_are_mended_instead_of_failing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode_many(["fine", "\ud83d\udc4d"])[1]) == "👍"
    train_tokenizer(["a\ud800b"], MIN_VOCAB_SIZE)


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1024")] == ["1", "0", "2", "4"]


def test_special_strings_are_text_unless_asked(tokenizer: Tokenizer) -> None:
    special = tokenizer.special_tokens.keys()
    assert not special & set(tokenizer.encode("<|im_end|> <|endoftext|>"))
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert tokenizer.decode([2], skip_special=True) == ""
    assert tokenizer.decode([2]) == "<|im_end|>"


def test_training_is_deterministic_and_sized(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(CORPUS, 400).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(CORPUS, 390).fingerprint != tokenizer.fingerprint
    assert tokenizer.vocab_size == 400
    assert train_tokenizer([], MIN_VOCAB_SIZE).vocab_size == MIN_VOCAB_SIZE
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (0, None, None)
    with pytest.raises(UserError, match="vocabulary size is 258"):
        train_tokenizer(CORPUS, 258)


def test_a_trained_token_is_never_too_long_to_be_read_again(tmp_path: Path) -> None:
    """Of a text that is one run of a character, each merge would double the longest token."""
    train_tokenizer(["\0" * 20_000], 300).save(tmp_path)
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("\0" * 9)) == "\0" * 9


def test_saved_files_give_the_same_ids_here_and_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in AWKWARD:
        assert theirs.encode(text, add_special_tokens=False, split_special_tokens=True) == tokenizer.encode(text)
    assert theirs.apply_chat_template(TWO_TURNS)["input_ids"] == tokenizer.encode_chat(TWO_TURNS)[0]
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_a_full_disk_is_an_error_of_the_system(tokenizer: Tokenizer, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            tokenizer.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG


def test_a_config_beside_it_does_not_change_the_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_a_pickled_tokenizer_still_keeps_special_strings_apart(tokenizer: Tokenizer) -> None:
    tokenizer.encode("warm")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("<|im_end|>") == tokenizer.encode("<|im_end|>")
    assert copy.fingerprint == tokenizer.fingerprint


def test_chatml_answers(tokenizer: Tokenizer) -> None:
    assert answers(tokenizer, TWO_TURNS) == ["It is 4.<|im_end|>", "日本 👍🏽 done<|im_end|>"]
    assert answers(tokenizer, TWO_TURNS[:3]) == ["It is 4.<|im_end|>"]
    assert tokenizer.stop_ids == {0, 2}


def test_llama3_style_answers() -> None:
    tokenizer = with_template(LLAMA3, ["<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>"])
    chat = [{"role": "system", "content": "Be brief."}, *TWO_TURNS]
    assert answers(tokenizer, chat) == ["It is 4.<|eot|>", "日本 👍🏽 done<|eot|>"]
    assert {tokenizer.special_tokens[i] for i in tokenizer.stop_ids} == {"<|endoftext|>", "<|eot|>"}


def test_mistral_style_answers() -> None:
    tokenizer = with_template(MISTRAL, ["<s>", "</s>"])
    assert answers(tokenizer, TWO_TURNS) == [" It is 4.</s>", " 日本 👍🏽 done</s>"]
    with pytest.raises(UserError, match="rejects a conversation of user, user: roles must alternate"):
        tokenizer.encode_chat([TWO_TURNS[0], TWO_TURNS[0]])


def test_generation_marks_are_followed() -> None:
    assert answers(with_template(MARKED, []), TWO_TURNS) == [" It is 4.<|im_end|>", " 日本 👍🏽 done<|im_end|>"]


def test_a_conversation_is_encoded_as_inference_would(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(tokenizer.render_chat(TWO_TURNS[:3], add_generation_prompt=True), parse_special=True)
    ids, mask = tokenizer.encode_chat(TWO_TURNS)
    assert ids[: len(prompt)] == prompt
    assert mask[len(prompt)]
    assert not mask[len(prompt) - 1]


def test_a_template_that_rewrites_history_is_refused() -> None:
    tokenizer = with_template(FORGETFUL, [])
    assert answers(tokenizer, TWO_TURNS[:2]) == ["It is 4.\n"]
    with pytest.raises(UserError, match="lays out message 1 differently"):
        tokenizer.encode_chat(TWO_TURNS)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "conversation is empty"),
        ([{"content": "hi"}], "needs a role"),
        (["hi"], "needs a role"),
        ([{"role": "user", "content": None}], "has content None"),
        ([{"role": "assistant", "content": "hi"}], "begins with an assistant"),
    ],
)
def test_what_is_not_a_conversation_is_refused(tokenizer: Tokenizer, messages: list, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        tokenizer.encode_chat(messages)


def test_no_template_and_broken_templates_are_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        with_template(None, []).render_chat(TWO_TURNS, add_generation_prompt=False)
    for template in ("{% for %}", "{{ messages[9].content + 1 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(UserError, match=r"rejects a conversation|cannot be used"):
            with_template(template, []).render_chat(TWO_TURNS, add_generation_prompt=False)


def test_broken_files_are_refused_with_a_sentence(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for cut in [0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 3]:
        (tmp_path / "tokenizer.json").write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_file_or_no_object_is_refused_and_not_waited_for(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A pipe that nobody writes to was waited for without end."""
    tokenizer.save(tmp_path)
    (tmp_path / name).write_text("[1]")
    with pytest.raises(UserError, match=rf"{name} is not the description of a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is a pipe and not a regular file"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"cannot read .*{name}: Is a directory"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", [{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}, {"version": "9"}])
def test_contradicting_files_are_refused(tokenizer: Tokenizer, tmp_path: Path, change: dict) -> None:
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_code_in_a_directory_is_never_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    load_tokenizer(tmp_path)
    assert not ran.exists()


def test_importing_it_is_light() -> None:
    modules = {"torch", "transformers", "tokenizers"}
    check = f"import sys, tightfit.models.text.tokenizer; assert not {modules} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """A server's other clients do not wait for it."""
    tokenizer = train_tokenizer(CORPUS, 300)
    text = " ".join(CORPUS) * 300
    done = threading.Event()

    def encode() -> None:
        assert len(tokenizer.encode(text)) > 100_000
        done.set()

    tokenizer.encode("a")
    worker = threading.Thread(target=encode)
    worker.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 20
    short = text[:9000]
    assert tokenizer.encode(short * 2)[:1000] == tokenizer.encode(short)[:1000]
