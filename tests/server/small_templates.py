"""Chat templates of the kinds that models are published with, as small as they can be."""

from __future__ import annotations

WRITE = "{{ '<|' + m.role + '|>' + m.content + '\\n' }}"
CALLS = "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
BODY = "{% if m.tool_calls %}" + CALLS + "{% else %}" + WRITE + "{% endif %}"
REFUSE = "{{ raise_exception('%s') }}"
KNOWN = "{% if m.role in ['system', 'user', 'assistant', 'tool'] %}"


def each(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}{% if add_generation_prompt %}<|go|>{% endif %}"


TURNS = """{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role != 'system' %}
{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}"""
TEMPLATES: dict[str, str] = {
    "takes all": each("{{ '<|' + m.role + '|>' }}{% if m.content %}{{ m.content }}{% endif %}" + CALLS),
    "drops developers": each(KNOWN + BODY + "{% endif %}"),
    "knows developers": each("{% if m.role == 'developer' %}{{ '<|dev|>' + m.content }}{% else %}" + BODY + "{% endif %}"),
    "one system message": each(
        "{% if m.role == 'system' and not loop.first %}" + REFUSE % "the system message must be the first" + "{% endif %}" + BODY
    ),
    "last system message": each(
        "{% if m.role != 'system' %}" + BODY + "{% endif %}",
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}",
    ).replace("{% for", "{% set ns = namespace(system='') %}{% for", 1),
    "no system": each("{% if m.role == 'system' %}" + REFUSE % "no system role" + "{% endif %}" + BODY),
    "drops systems": each("{% if m.role != 'system' %}" + BODY + "{% endif %}"),
    "system before the first question": """
        {%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}
        {%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
        {%- for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}
        {{- '<|' + m.role + '|>' + (first if loop.first else '') + m.content }}{% endfor %}""",
    "turns": each(WRITE, TURNS),
    "turns without calls": each(
        BODY,
        TURNS.replace("m.role != 'system'", "m.role == 'user' or (m.role == 'assistant' and not m.tool_calls)"),
    ),
    "arguments are text": each(BODY.replace("(c.function.arguments | tojson)", "c.function.arguments")),
    "arguments are members": each(
        BODY.replace("(c.function.arguments | tojson)", "''").replace(
            "{% endfor %}", "{% for key, value in c.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
        )
    ),
    "arguments of both": each(
        BODY.replace(
            "(c.function.arguments | tojson)",
            "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
        )
    ),
    "calls by no content": each(
        "{% if m.role == 'assistant' and m['content'] is none %}"
        + CALLS.replace("(c.function.arguments | tojson)", "c.function.arguments")
        + "{% endif %}{% if m['content'] is not none %}" + WRITE + "{% endif %}"
    ),
    "content joined to calls": each(
        "{% if 'tool_calls' in m %}{{ m['content'] + '' }}" + CALLS + "{% else %}" + WRITE + "{% endif %}"
    ),
    "one call": each("{% if m.tool_calls and m.tool_calls | length != 1 %}" + REFUSE % "one call" + "{% endif %}" + BODY),
    "first call": each(BODY.replace("in m.tool_calls", "in m.tool_calls[:1]")),
    "results need a call": each(
        "{% if m.tool_calls %}{% set ns.last = m.tool_calls[0].function.name %}"
        + CALLS.replace("in m.tool_calls", "in m.tool_calls[:1]")
        + "{% elif m.role == 'tool' %}{% if not ns.last %}" + REFUSE % "no call" + "{% endif %}{{ ns.last + m.content }}"
        + "{% else %}{% set ns.last = '' %}" + WRITE + "{% endif %}",
        "{% set ns = namespace(last='') %}",
    ),
    "results need a name": each("{% if m.role == 'tool' %}{{ m['name'] + m.content }}{% else %}" + BODY + "{% endif %}"),
    "nine characters": each(
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}" + REFUSE % "nine" + "{% endif %}{% endfor %}" + BODY
    ),
    "no tools": each("{% if m.role in ['system', 'user', 'assistant'] %}" + WRITE + "{% endif %}"),
    "text or calls": each(
        "{% if m.tool_calls and m.content %}" + REFUSE % "content and calls" + "{% endif %}" + BODY
    ),
    "parts": each("{{ '<|' + m.role + '|>' }}{% for part in m.content %}{{ part['text'] }}{% endfor %}"),
    "asks for a question": each(
        BODY,
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}" + REFUSE % "no question" + "{% endif %}",
    ),
}  # fmt: skip
