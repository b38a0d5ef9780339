"""Templates render as in transformers, and none takes more than a bounded time and memory, whatever it says."""

import time
from itertools import product
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.covering import sampled, thorough
from tightfit.errors import UserError
from tightfit.hardware.cpu import peak_resident_bytes
from tightfit.models.text import template_limits
from tightfit.models.text.chat_template import ChatTemplate
from tightfit.models.text.tokenizer import CHATML_TEMPLATE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is\n2 + 2? "},
    {"role": "assistant", "content": "<think>easy</think>\n4"},
    {"role": "user", "content": "and <b>\u00e9</b> {{ x }}?"},
    {"role": "assistant", "content": "no"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USUAL = {
    "chatml": CHATML_TEMPLATE,
    "llama-2": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama-3": "{%- if strftime_now is defined %}{%- set day = strftime_now('%Y')[:2] %}{%- endif %}{{ day }}"
    "{% for message in messages %}{% set content = '<|start|>' + message['role'] + '<|end|>\\n\\n'"
    "+ message['content'] | trim + '<|eot|>' %}{% if loop.first %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}",
    "qwen-3": "{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' %}{%- set ns.multi_step_tool = false %}"
    "{%- set ns.last = index %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- if '</think>' in message.content %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- else %}{%- set content = message.content %}{%- endif %}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>' }}"
    "{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor %}",
    "macros and json": "{% macro line(m, level=1) %}{{ '#' * level }} {{ m.role|upper }}: {{ m|tojson(indent=2) }}\n"
    "{% endmacro %}{% for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}{{ line(m, loop.index) }}"
    "{% endfor %}{{ messages|map(attribute='role')|unique|join(', ') }} {{ '%s-%05.1f' % ('x', 2.5) }}"
    " {{ '{}:{:>4}'.format('y', 1700000000) }} {{ undefined_thing|default(1700000000) }} {{ 'a,b'.split(',')|list }}"
    " {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [3, 1, 2]|sort|last }} {{ 7 // 2 }}"
    " {{ dict(a=1).items()|list }} {{ range(3)|list }} {{ 'abc'|replace('b', '<b>') }} {{ 2 ** 10 }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", USUAL.values(), ids=USUAL)
def test_texts_and_marks_are_those_of_transformers(template: str, prompt: bool) -> None:
    render: Any = render_jinja_template
    values = {"add_generation_prompt": prompt, **SPECIAL}
    for chat in (CHAT, CHAT[:2], CHAT[1:3]):
        marked = "{% generation" in template
        texts, spans = render([chat], chat_template=template, return_assistant_tokens_mask=marked, **values)
        expected = [tuple(span) for span in spans[0]] if marked else []
        assert ChatTemplate(template).render(chat, **values) == (texts[0], expected)


HOSTILE = {
    "a power as a factor": "{{ 'a' * 10**10 }}",
    "a large factor": "{{ 'a' * 10000000000 }}",
    "a list of gigabytes": "{{ ([0] * 10000000000)|length }}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops that print nothing": "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a text in a loop": "{% set x %}{% for a in range(99999) %}" + "y" * 10_000 + "{% endfor %}{% endset %}{{ x }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by joining": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "doubling by formatting": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling by replacing": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling in dicts": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "lists of lists compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "lists of lists joined": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ 'a' ~ ns.x }}",
    "lists of lists formatted": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ '%s' % ns.x }}",
    "lists of lists as json": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x|tojson }}",
    "tuples of tuples as keys": "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
    "{% endfor %}{{ {ns.x: 1}|length }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a width": "{{ 'a'.center(10000000000) }}",
    "a width of a filter": "{{ 'a'|center(10000000000) }}",
    "a width in a format": "{{ '%10000000000d' % 1 }}",
    "a width beside a format": "{{ '%*d' % (10000000000, 1) }}",
    "a width in a new format": "{{ '{:>10000000000}'.format(1) }}",
    "a width beside a new format": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "zeros": "{{ '1'.zfill(10000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10000000) }}",
    "indentation": "{{ ('a\n' * 1000)|indent(10000000) }}",
    "indented json": "{{ messages|tojson(indent=1000000000) }}",
    "replacing nothing": "{{ ('a' * 100000)|replace('', 'b' * 100000) }}",
    "joining": "{{ range(99999)|join('b' * 100000) }}",
    "joining by a method": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "batches": "{{ [1]|batch(1000000000, 0)|list|length }}",
    "a long number": "{{ 10 ** (10 ** 10) }}",
    "a number that grows": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "bytes of a number": "{{ (5).to_bytes(10000000000, 'big') }}",
    "much text of short pieces": "{% for i in range(99999) %}{{ 10 ** 10 ** 10 }}{% endfor %}",
    "placeholder text": "{{ lipsum(n=100000) }}",
    "a template of megabytes": "x" * 300_000,
    "brackets": "{{ " + "(" * 5000 + " }}",
    "attributes of Python": "{{ ''.__class__.__mro__ }}",
    "slices held": "{% set s = 'a' * 10000000 %}{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
}


ALL = template_limits.FUEL
TENTH = ALL // 10
"""Enough to see that what a template does is paid for."""
SMALL_BYTES = 100 * 2**20
"""What the process may need beside: compiled templates, the allocator's reserve."""
BETWEEN_PAYMENTS_S = 60
"""The clock is read when something is paid: work that nobody pays for would go on for hours."""


@sampled(3)
@pytest.mark.parametrize(("fuel", "name"), [*product([TENTH], HOSTILE), *(thorough(ALL, name) for name in HOSTILE)])
def test_no_template_takes_more_than_its_share(fuel: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of its fuel is gone long before the clock ends it, which is there for what fuel does not see."""
    monkeypatch.setattr(template_limits, "FUEL", fuel)
    began, peak = time.thread_time(), peak_resident_bytes()
    with pytest.raises(UserError, match="chat template") as caught:
        ChatTemplate(HOSTILE[name]).render(CHAT, add_generation_prompt=True)
    assert fuel == ALL or "takes longer" not in str(caught.value)
    assert peak_resident_bytes() - peak < 600 * 2**20 * fuel / ALL + SMALL_BYTES
    assert time.thread_time() - began < template_limits.SECONDS + BETWEEN_PAYMENTS_S


def test_long_conversations_are_no_hostile_ones() -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(1000)]
    for template in (USUAL["qwen-3"], USUAL["chatml"]):
        assert len(ChatTemplate(template).render(chat, add_generation_prompt=False)[0]) > 1_000_000
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x" * 10**7}])[0] == "x" * 10**7
    )
