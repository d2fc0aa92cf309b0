"""Chat templates of the kinds that models are published with, as small as they can be."""

from __future__ import annotations

JSON = "(c.function.arguments | tojson)"
WRITE = "{{ '<|' + m.role + '|>' + m.content + '\\n' }}"
CALLS = "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + " + JSON + " }}{% endfor %}"
FIRST_CALL = CALLS.replace("in m.tool_calls", "in m.tool_calls[:1]")
TEXT_CALLS = CALLS.replace(JSON, "c.function.arguments")


def when(condition: str, then: str, other: str = "") -> str:
    return "{% if " + condition + " %}" + then + "{% else %}" + other + "{% endif %}"


def refuse(condition: str, why: str = "refused") -> str:
    return when(condition, "{{ raise_exception('" + why + "') }}")


def each(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"


def turns(counted: str) -> str:
    check = refuse("(m.role == 'user') != (ns.turn % 2 == 0)", "roles must alternate")
    count = when(counted, check + "{% set ns.turn = ns.turn + 1 %}")
    return "{% set ns = namespace(turn=0) %}{% for m in messages %}" + count + "{% endfor %}"


BODY = when("m.tool_calls", CALLS, WRITE)
MEMBERS = "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
EITHER = "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)"
SYSTEM_LAST = "{% set ns = namespace(system='') %}{% for m in messages %}"
SYSTEM_LAST += when("m.role == 'system'", "{% set ns.system = m.content %}") + "{% endfor %}{{ ns.system }}"
SYSTEM_IN_QUESTION = """
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('refused') }}{% endif %}
{{- '<|' + m.role + '|>' + (first if loop.first else '') + m.content }}{% endfor %}"""
NO_QUESTION = "messages | selectattr('role', 'equalto', 'user') | list | length == 0"

TEMPLATES: dict[str, str] = {
    "takes all": each("{{ '<|' + m.role + '|>' }}" + when("m.content", "{{ m.content }}") + CALLS),
    "drops developers": each(when("m.role in ['system', 'user', 'assistant', 'tool']", BODY)),
    "knows developers": each(when("m.role == 'developer'", "{{ '<|dev|>' + m.content }}", BODY)),
    "one system message": each(refuse("m.role == 'system' and not loop.first") + BODY),
    "last system message": each(when("m.role != 'system'", BODY), SYSTEM_LAST),
    "no system": each(refuse("m.role == 'system'", "no system role") + BODY),
    "drops systems": each(when("m.role != 'system'", BODY)),
    "system before the first question": SYSTEM_IN_QUESTION,
    "turns": each(WRITE, turns("m.role != 'system'")),
    "turns without calls": each(BODY, turns("m.role == 'user' or (m.role == 'assistant' and not m.tool_calls)")),
    "arguments are text": each(BODY.replace(JSON, "c.function.arguments")),
    "arguments are members": each(BODY.replace(" + " + JSON + " }}", " }}" + MEMBERS)),
    "arguments are both": each(BODY.replace(JSON, EITHER)),
    "calls where content is none": each(
        when("m['content'] is none", TEXT_CALLS) + when("m['content'] is not none", WRITE)
    ),
    "content before calls": each(when("'tool_calls' in m", "{{ m['content'] + '' }}" + CALLS, WRITE)),
    "system in the last question": each(
        when("m.role == 'user' and loop.last", "{{ ns.system }}") + when("m.role != 'system'", BODY),
        SYSTEM_LAST.removesuffix("{{ ns.system }}"),
    ),
    "one call": each(refuse("m.tool_calls and m.tool_calls | length != 1") + BODY),
    "first call": each(when("m.tool_calls", FIRST_CALL, WRITE)),
    "results need a call": each(
        when(
            "m.tool_calls",
            "{% set ns.last = m.tool_calls[0].function.name %}" + FIRST_CALL,
            when(
                "m.role == 'tool'",
                refuse("not ns.last") + "{{ ns.last + m.content }}",
                "{% set ns.last = '' %}" + WRITE,
            ),
        ),
        "{% set ns = namespace(last='') %}",
    ),
    "results need a name": each(when("m.role == 'tool'", "{{ m['name'] + m.content }}", BODY)),
    "nine characters": each("{% for c in m.tool_calls or [] %}" + refuse("c.id | length != 9") + "{% endfor %}" + BODY),
    "names in ids": each(
        when(
            "m.tool_calls",
            CALLS.replace("c.function.name", "c.id"),
            "{{ '<|' + (m.name or m.role) + '|>' + (m.tool_call_id or '') + m.content }}",
        )
    ),
    "no call without a result": each(
        when("not (m.tool_calls and loop.last and add_generation_prompt)", BODY),
    ),
    "no tools": each(when("m.role in ['system', 'user', 'assistant']", WRITE)),
    "text or calls": each(refuse("m.tool_calls and m.content") + BODY),
    "parts": each("{{ '<|' + m.role + '|>' }}{% for part in m.content %}{{ part['text'] }}{% endfor %}"),
    "asks for a question": each(BODY, refuse(NO_QUESTION)),
}
