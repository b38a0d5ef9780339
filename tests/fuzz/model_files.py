"""Cases of models: configs, weights, indices, pieces, GGUF files, tokenizers and chat templates."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.changing import changed_bytes, changed_value, dumped, nested, number, value, word
from tests.fuzz.materials import CHAT, Materials
from tightfit.models.files.sharded_weights import FOLDER, read_pieces, stored_tensors
from tightfit.models.generate import Sampling, continue_text
from tightfit.models.gguf.config import gguf_spec
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import load_gguf_tokenizer
from tightfit.models.gguf.tokenizer import read_tokenizer
from tightfit.models.loading import load_model
from tightfit.models.resolve import resolve_spec
from tightfit.models.text.chat_template import ChatTemplate
from tightfit.models.text.tokenizer import CHATML_TEMPLATE, load_tokenizer

Case = Callable[[], object]
PATTERNS = (
    r"(a+)+$",
    r"(a|a)*b",
    r"(\s*)*x",
    r"\p{L}+",
    "(",
    "[",
    r"(?<=a",
    r"\1",
    "",
    "(?:" * 300,
    r"(.*)(.*)(.*)x$",
    "^",
)
EXPRESSIONS = (
    "'a' * 10**10",
    "range(99999)|list|join('x' * 9999)",
    "messages|tojson(indent=99999999)",
    "x.y.z",
    "messages[9].a",
    "''.__class__",
    "messages|map('upper')|list",
    "'%999999999d' % 1",
    "'{:>{w}}'.format(1, w=10**9)",
    "10 ** 10 ** 10",
    "messages|sort",
    "messages * 10**8",
    "namespace(__class__=1)",
    "raise_exception('no')",
    "self",
    "loop",
    "caller()",
    "messages[::-1]",
    "messages[0].content[:9**9]",
    "'a' ~ messages",
    "messages|batch(10**9)|list",
    "cycler(1).next()",
    "'\x1b[31m'",
    "strftime_now('%Y' * 999)",
    "dict(a=1).update({'b': 2})",
    "(1,2) < 3",
    "{[]: 1}",
    "'a'.join(1)",
)


def _copied(given: Path, folder: Path) -> Path:
    shutil.copytree(given, folder / "model")
    return folder / "model"


def config(chance: random.Random, given: Materials, folder: Path) -> Case:
    """config.json."""
    content = json.loads((given.model / "config.json").read_text())
    content["model_type"] = chance.choice(
        ("llama", "qwen2", "gemma2", "gemma3_text", "phi3", "mixtral", "gpt2", "qwen3_moe")
    )
    (folder / "config.json").write_bytes(dumped(chance, changed_value(chance, content, chance.choice((1, 2, 4)))))
    return lambda: resolve_spec(str(folder)).params()


def shape_of_weights(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A config.json that is not that of the weights beside it."""
    target = _copied(given.model, folder)
    content = json.loads((target / "config.json").read_text())
    name = chance.choice([key for key, each in content.items() if isinstance(each, int)])
    (target / "config.json").write_text(json.dumps({**content, name: chance.choice((1, 7, 4096, 2**20, 10_000))}))
    return lambda: load_model(str(target))


def safetensors(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Weights with wrong bytes, most of them in the header."""
    target = _copied(given.model, folder)
    path = target / "model.safetensors"
    content = path.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(changed_bytes(chance, content[:head]) + content[head:])

    def run() -> None:
        loaded = load_model(str(target))
        for _ in continue_text(loaded, "a", Sampling(max_tokens=2))[0]:
            pass

    return run


def safetensors_index(chance: random.Random, given: Materials, folder: Path) -> Case:
    """model.safetensors.index.json."""
    target = _copied(given.model, folder)
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    names = {
        "model.embed_tokens.weight": "model-00001-of-00001.safetensors",
        "model.norm.weight": "../../x.safetensors",
    }
    content = changed_value(chance, {"metadata": {"total_size": 9}, "weight_map": names}, chance.choice((1, 2)))
    (target / "model.safetensors.index.json").write_bytes(dumped(chance, content))
    return lambda: load_model(str(target))


def gguf_file(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A GGUF file with wrong bytes."""
    path = folder / "model.gguf"
    head = given.gguf[: len(given.gguf) // 2] if chance.random() < 0.7 else given.gguf
    path.write_bytes(changed_bytes(chance, head) + given.gguf[len(head) :])

    def run() -> None:
        file = GgufFile(path)
        gguf_spec(file)
        load_gguf_tokenizer(file)
        load_model(str(path))

    return run


def gguf_vocabulary(chance: random.Random, given: Materials, folder: Path) -> Case:
    """The tokenizer in a GGUF file's metadata."""
    unit = chance.choice(("a", "ab", "▁a", "é"))
    tokens = chance.choice(
        (
            [unit * length for length in range(1, chance.choice((5, 300, 1500)))],
            [unit * chance.choice((10, 2_000_000))],
            ["<unk>", "<s>", "</s>", *(chr(97 + i % 26) * (1 + i // 26) for i in range(500))],
            [word(chance) for _ in range(20)],
        )
    )
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": chance.choice(("llama", "gpt2", "bert", None)),
        "tokenizer.ggml.pre": chance.choice(("gpt-2", "llama-bpe", "x", None)),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [chance.choice((1, 1, 1, 2, 3, 4, 6, 9)) for _ in tokens],
        "tokenizer.ggml.merges": chance.choice((["a b"], ["a"], [], [word(chance)])),
        "tokenizer.ggml.bos_token_id": chance.choice((0, 1, number(chance))),
    }
    if chance.random() < 0.5:
        metadata[chance.choice(list(metadata))] = value(chance)
    return lambda: read_tokenizer(metadata, folder / "x.gguf").encode("aaa ab é 1")


def tokenizer_json(chance: random.Random, given: Materials, folder: Path) -> Case:
    """tokenizer.json: values that are wrong, ids, expressions and replacements."""
    target = _copied(given.model, folder)
    content = json.loads((target / "tokenizer.json").read_text())
    pattern = {"Regex": chance.choice(PATTERNS)}
    step = chance.choice(
        (
            {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}},
            {"normalizer": {"type": "Replace", "pattern": pattern, "content": "x" * chance.choice((1, 50))}},
            {"normalizer": _doubling(chance.choice((2, 6, 40)))},
            {"normalizer": {"type": "Sequence", "normalizers": [nested(chance.choice((3, 2000)))]}},
            {"added_tokens": [{**content["added_tokens"][0], "id": number(chance)}]},
            {"model": {**content["model"], "vocab": {**content["model"]["vocab"], "zz": number(chance)}}},
            changed_value(chance, content, chance.choice((1, 3))),
        )
    )
    (target / "tokenizer.json").write_bytes(dumped(chance, {**content, **step} if isinstance(step, dict) else step))
    return lambda: load_tokenizer(target).encode("a" * 3000 + "!  \n1 é")


def _doubling(times: int) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [one] * times}


def tokenizer_config(chance: random.Random, given: Materials, folder: Path) -> Case:
    """tokenizer_config.json and what else lies beside it."""
    target = _copied(given.model, folder)
    path = chance.choice(
        [*sorted(target.glob("*token*config*")), target / "special_tokens_map.json", target / "added_tokens.json"]
    )
    content = json.loads(path.read_text()) if path.exists() else {"eos_token": "<|endoftext|>"}
    path.write_bytes(dumped(chance, changed_value(chance, content, chance.choice((1, 3)))))
    if chance.random() < 0.2:
        (target / "chat_template.jinja").write_text(_template(chance), encoding="utf-8", errors="replace")

    def run() -> None:
        loaded = load_tokenizer(target)
        assert loaded.stop_ids is not None
        loaded.encode_chat(CHAT)

    return run


def _template(chance: random.Random) -> str:
    text = CHATML_TEMPLATE
    for _ in range(chance.choice((0, 1, 2))):
        at = chance.randrange(len(text))
        text = (
            text[:at]
            + chance.choice(("{% for a in range(9999) %}", "{{", "%}", "{% endfor %}", word(chance)))
            + text[at:]
        )
    part = "{{ " + chance.choice(EXPRESSIONS) + " }}"
    for _ in range(chance.choice((0, 1, 3))):
        part = f"{{% for i{chance.randrange(9)} in range({chance.choice((3, 99999))}) %}}{part}{{% endfor %}}"
    return chance.choice(
        (text, part, text + part, f"{{% macro f() %}}{part}{{{{ f() }}}}{{% endmacro %}}{{{{ f() }}}}")
    )


def template(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A chat template."""
    text = _template(chance)
    return lambda: ChatTemplate(text).render(CHAT, add_generation_prompt=True, eos_token="x")


def piece_index(chance: random.Random, given: Materials, folder: Path) -> Case:
    """The index of pieces: wrong bytes, or a pickle that wants to do something."""
    shutil.copytree(given.pieces, folder / "step")
    path = folder / "step" / FOLDER / ".metadata"
    content = path.read_bytes()
    hostile = (
        b"cos\nsystem\n(S'mkdir executed'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        pickle.dumps([nested(50)] * 3),
        b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b".",
        b"Nr\xff\xff\xff\x0f.",
        b"(" * 100_000,
    )
    path.write_bytes(chance.choice(hostile) if chance.random() < 0.2 else changed_bytes(chance, content))

    def run() -> None:
        from tests.fuzz.materials import SPEC
        from tightfit.models.decoder import Decoder
        from tightfit.models.files.sharded_weights import weights_of

        stored_tensors(folder / "step")
        read_pieces(weights_of(Decoder(SPEC)), folder / "step")

    return run


def piece(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A piece with wrong bytes."""
    case = piece_index(random.Random(0), given, folder)
    shutil.rmtree(folder / "step")
    shutil.copytree(given.pieces, folder / "step")
    (path,) = (folder / "step" / FOLDER).glob("*.distcp")
    path.write_bytes(changed_bytes(chance, path.read_bytes()))
    return case


def checksums(chance: random.Random, given: Materials, folder: Path) -> Case:
    """checksums.json."""
    from tightfit.models.files.checksums import write_checksums

    target = _copied(given.model, folder)
    write_checksums(target)
    content = json.loads((target / "checksums.json").read_text())
    (target / "checksums.json").write_bytes(dumped(chance, changed_value(chance, content, chance.choice((1, 2)))))
    return lambda: load_model(str(target))


KINDS = {
    "config.json": config,
    "config beside weights": shape_of_weights,
    "safetensors": safetensors,
    "safetensors index": safetensors_index,
    "gguf": gguf_file,
    "gguf vocabulary": gguf_vocabulary,
    "tokenizer.json": tokenizer_json,
    "tokenizer config": tokenizer_config,
    "chat template": template,
    "index of pieces": piece_index,
    "piece": piece,
    "checksums.json": checksums,
}
