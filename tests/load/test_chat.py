"""Chat templates: the same text as transformers for honest ones, a quick one-line error for hostile ones."""

from __future__ import annotations

import datetime
import threading
import tracemalloc
from typing import Any

import pytest

from pyllm.load import ChatTemplateError, CheckpointError, render_chat
from pyllm.load.chat import MAX_TEMPLATE

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be  brief. "},
    {"role": "user", "content": "<b>Hi</b> & \u00e9\u6f22\U0001f600 {{ not_a_variable }} {% nor a tag %}"},
    {"role": "assistant", "content": "a</think>b", "tool_calls": [{"name": "f", "arguments": {"x": [1, 2.5, None, True], "y": "\u00e9"}}]},
    {"role": "tool", "content": ""},
]

HONEST = {
    "chatml": """{% for m in messages %}
{{ '<|' + m['role'] + '|>' ~ m.content | trim }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "namespace and loop": """{%- set ns = namespace(n=0, seen='') -%}
{%- for m in messages if m.role != 'system' -%}
  {%- set ns.n = ns.n + 1 -%}{%- set ns.seen = ns.seen ~ m.role[0] -%}
  {{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.previtem.role if loop.previtem is defined }}
{%- else -%}none{%- endfor -%}{{ ns.n }}{{ ns.seen }}""",
    "tools": """{{ bos_token }}{% if tools is defined and tools %}{{ tools | tojson }}|{{ tools | tojson(indent=4) }}{% endif %}
    {% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.name }}({{ c.arguments | tojson }}){% endfor %}
    {% endif %}{% endfor %}{{ eos_token }}""",
    "strings": """{% for m in messages %}{{ m.content.strip().split('</think>')[-1].lstrip('\\n') }}|{{ m.role.upper().title() }}
{{- m.content.replace('a', 'b') | replace('b', 'cc') | length }}{{ m.content.startswith('B') }}{% endfor %}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | first).role }} {{ (messages | last).role }} {{ nothing | default('d') }}
{{ messages[1:] | length }} {{ messages[::-1][0].role }}
{{ [3, 1, 2] | sort | join('-') }} {{ {'b': 1, 'a': 2} | dictsort }} {{ {'k': 'v'} | items | list }} {{ 2.567 | round(1) }}
{{ [1, 2, 3, 4, 5] | batch(2) | list }} {{ [1, 2, 3] | slice(2) | list }}
{{ 'a' | upper }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 'ab' * 3 }} {{ -3 | abs }}""",
    "macro": """{%- macro show(m, mark='*') -%}{{ mark }}{{ m.role }}{{ caller() if caller }}{{ varargs }}{%- endmacro -%}
{% for m in messages %}{{ show(m) }}{{ show(m, '#', 1, 2) }}{% endfor %}{% call show(messages[0]) %}inside{% endcall %}""",
    "values": """{{ none }} {{ true }} {{ 1.5 }} {{ [1, 'a', none] }} {{ (1, 2) }} {{ {'a': [1]} }}
{{ undefined_name }}{{ messages[0].nope }}.""",
    "block set": """{% set text %}{% for m in messages %}{{ m.role }};{% endfor %}{% endset %}
{{ text | length }}{{ text }}{% set a, b = 1, 2 %}{{ a + b }}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}""",
    "break": """{% for m in messages %}{% if loop.index == 2 %}{% continue %}
{% elif loop.index > 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}""",
    "dict": """{% set d = dict(a=1, **{'b': 2}) %}{{ d.a }}{{ d['b'] }}{{ d.get('c', 3) }}{{ d.items() | list }}
{{ 'a' in d }}{{ 1 < 2 < 3 }}""",
    "white space": "\n  {% if true %}  \n   x {%- if true +%}  y\n  {% endif %}\n{% endif %}\n\n",
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(name: str, prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"name": "f", "parameters": {"type": "object", "x": "<\u00e9>"}}]
    given = {"messages": MESSAGES, "tools": tools, "add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    want = utils._compile_jinja_template(HONEST[name]).render(**given)
    assert render_chat(HONEST[name], MESSAGES, prompt, "<s>", "</s>", tools=tools) == want
    assert want.strip()


def test_demo_model_template(demo_path: Any) -> None:
    from pyllm.load import open_checkpoint

    want = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    want += "<|im_start|>user\nhi<|im_end|>\n"
    model = open_checkpoint(demo_path)
    assert model.render_chat([{"role": "user", "content": "hi"}]) == want + "<|im_start|>assistant\n"
    assert model.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == want
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_values_up_to_the_bound_are_served() -> None:
    assert render_chat("{{ ('a' * 4000000) | length }} {{ ([1] * 60000) | length }}", []) == "4000000 60000"


def test_strftime_now() -> None:
    year = datetime.datetime.now().year
    assert render_chat("{{ strftime_now('%Y') }}", []) in (str(year), str(year + 1))


GROW = "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='ab') %}"
GROW += "{% for i in range(100) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x | length }}"
VALUE, STEPS = "makes a value of more than", "takes more than 100000 steps"
HOSTILE: dict[str, tuple[str, str]] = {
    **{
        f"grow by {e}": (GROW.replace("EXPRESSION", e), VALUE)
        for e in (
            "ns.x ~ ns.x",
            "ns.x + ns.x",
            "[ns.x, ns.x]",
            "(ns.x, ns.x)",
            "{'a': ns.x, 'b': ns.x}",
            "dict(a=ns.x, b=ns.x)",
            "two(ns.x)",
            "[ns.x] * 2",
            "ns.x * 2",
            "ns.x | replace('a', 'aab')  ~ 'a' | replace('a', ns.x)",
            "ns.x.replace('b', 'bb' ~ ns.x)",
            "[ns.x, ns.x] | join",
            "''.join([ns.x, ns.x])",
        )
    },
    "grow in a block": (GROW.replace("{% set ns.x = EXPRESSION %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"), VALUE),
    "fixed text in a block": ("{% set x %}{% for i in range(99999) %}" + "a" * 90_000 + "{% endfor %}{% endset %}", "prints more than"),
    "much output": ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "makes more than 8388608 characters"),
    "nested loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    "filtered loops": ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", STEPS),
    "long range": ("{{ range(9999999) | list }}", "Range too big"),
    "macro tree": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", STEPS),
    "macro recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "recursive loop": ("{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}", "recursive loops are not supported"),
    "long string": ("{{ 'a' * 99999999999 }}", VALUE),
    "long list": ("{{ [1] * 99999999999 }}", VALUE),
    "power": ("{{ 9 ** 999999999 }}", "raises to a power of more than 64"),
    "powers": ("{{ 9 ** 64 ** 64 ** 64 ** 64 ** 64 }}", "makes a number of more than 4096 bits"),
    "round": ("{{ 2 | round(999999999, 'ceil') }}", "rounds to more than 16 digits"),
    "indent": ("{{ messages | tojson(indent=99999999) }}", VALUE),
    "slice": ("{{ [1, 2] | slice(999999999) | list }}", VALUE),
    "batch": ("{{ [1, 2] | batch(999999999) | list }}", VALUE),
    "fill": ("{{ [1, 2] | batch(9, 'x') | list }}", "TypeError"),
    "width": ("{{ '%99999999d' % 3 }}", "uses % on a string"),
    "format": ("{{ '{:>99999999}'.format(1) }}", "uses str.format"),
    "ljust": ("{{ 'a'.ljust(99999999) }}", "attribute 'ljust' of 'str' object is unsafe"),
    "center": ("{{ 'a' | center(99999999) }}", "No filter named 'center'"),
    "center by name": ("{{ ['a'] | map('center', 99999999) | list }}", "No filter named 'center'"),
    "replace nothing": ("{{ ('a' * 9999) | replace('', 'b' * 9999) }}", VALUE),
    "date width": ("{{ strftime_now('%99999999Y') }}", "uses strftime_now with a format"),
    "join attribute": ("{{ messages | join(attribute='role') }}", r"uses join\(attribute=...\)"),
    "class": ("{{ ''.__class__.__mro__ }}", "attribute '__class__' of 'str' object is unsafe"),
    "attr by string": ("{{ messages['__class__'].__subclasses__() }}", "unsafe|undefined|has no"),
    "globals": ("{{ raise_exception.__globals__.x }}", "attribute '__globals__' of 'function' object is unsafe"),
    "undefined": ("{{ x.__init__.__globals__ }}", "attribute '__init__' of 'Undefined' object is unsafe"),
    "underscored namespace": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "starts with an underscore"),
    "underscored namespace argument": ("{% set ns = namespace(_a=1) %}", "starts with an underscore"),
    "lipsum": ("{{ lipsum(n=9999) }}", "'lipsum' is undefined"),
    "changing the messages": ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
    "printing an object": ("{{ namespace() }}", "prints a value of type _PlainNamespace"),
    "printing a function": ("{{ raise_exception }}", "prints a value of type function"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "syntax": ("line\n{% if %}", "line 2: Expected an expression"),
    "nesting": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "nested too deep"),
    "its own error": ("{{ raise_exception('roles must\nalternate') }}", "chat template: roles must alternate$"),
    "attribute of nothing": ("{{ messages[0].a.b }}", "has no attribute 'a'"),
    "wrong type": ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    "too long": ("a" * (MAX_TEMPLATE + 1), "262145 characters, more than 262144"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_fail_soon_and_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By counting, not by the clock, which is set aside: tracemalloc slows everything ten times. Unbounded, these would take hours."""
    monkeypatch.setattr("pyllm.load.budget.MAX_SECONDS", 100.0)
    monkeypatch.setattr("pyllm.load.budget.MAX_STEPS", 100_000)
    template, message = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match=message) as raised:
            render_chat(template, MESSAGES)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, CheckpointError)
    assert peak < 256 << 20


def test_the_clock_stops_a_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllm.load.budget.MAX_SECONDS", 0.02)
    with pytest.raises(ChatTemplateError, match=r"takes more than 0.02 seconds"):
        render_chat(HOSTILE["nested loops"][0], MESSAGES)


def test_errors_leave_no_budget_behind_and_threads_do_not_share_one() -> None:
    slow, good = HOSTILE["nested loops"][0], HONEST["chatml"]
    want = render_chat(good, MESSAGES)
    results: list[str] = []

    def work() -> None:
        with pytest.raises(ChatTemplateError, match="takes more than"):
            render_chat(slow, MESSAGES)
        results.append(render_chat(good, MESSAGES))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want, want]


def test_a_long_conversation_is_within_the_bounds() -> None:
    """Two thousand turns of two thousand characters."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(2000)]
    text = render_chat(HONEST["chatml"], messages)
    assert len(text) > 2000 * 1999
