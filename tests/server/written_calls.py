"""Small chat templates that write past answers as the published ones of their families do."""

from __future__ import annotations

JSON = "(v if v is string else v | tojson)"


def _each_argument(written: str) -> str:
    return "{% for k, v in c.function.arguments.items() %}{{ " + written + " }}{% endfor %}"


def _talk(answer: str, other: str, prompt: str) -> str:
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}"
        + other
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


_CALLS = "{% for c in m.tool_calls or [] %}{{ "
_THOUGHT = "(m.reasoning_content or '')"

TEMPLATES = {
    "glm45": _talk(
        "{{ '<|assistant|>\\n<think>' + "
        + _THOUGHT
        + " + '</think>' + ('\\n' + m.content if m.content else '') }}"
        + _CALLS
        + "'\\n<tool_call>' + c.function.name + '\\n' }}"
        + _each_argument("'<arg_key>' + k + '</arg_key>\\n<arg_value>' + " + JSON + " + '</arg_value>\\n'")
        + "{{ '</tool_call>' }}{% endfor %}",
        "{{ '<|' + m.role + '|>\\n' + m.content }}",
        "{{ '<|assistant|>' + ('' if enable_thinking is not defined or enable_thinking else '\\n<think></think>') }}",
    ),
    "glm47": _talk(
        "{{ '<|assistant|>' + ('<think>' + m.reasoning_content if m.reasoning_content else '') + '</think>' }}"
        + "{{ m.content or '' }}"
        + _CALLS
        + "'<tool_call>' + c.function.name }}"
        + _each_argument("'<arg_key>' + k + '</arg_key><arg_value>' + " + JSON + " + '</arg_value>'")
        + "{{ '</tool_call>' }}{% endfor %}",
        "{{ '<|' + m.role + '|>' + m.content }}",
        "{{ '<|assistant|>' + ('<think>' if enable_thinking is not defined or enable_thinking else '</think>') }}",
    ),
    "minimax_m2": _talk(
        "{{ ']~b]ai\\n' + ('<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content else '') }}"
        + "{{ m.content or '' }}{% if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}"
        + _CALLS
        + "'<invoke name=\"' + c.function.name + '\">\\n' }}"
        + _each_argument("'<parameter name=\"' + k + '\">' + " + JSON + " + '</parameter>\\n'")
        + "{{ '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}",
        "{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}",
        "{{ ']~b]ai\\n<think>\\n' }}",
    ),
    "kimi_k2": _talk(
        "{{ '<|im_assistant|>assistant<|im_middle|><think>' + " + _THOUGHT + " + '</think>' + (m.content or '') }}"
        "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}"
        + _CALLS
        + "'<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + (c.function.arguments | tojson) }}"
        + "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}",
        "{{ '<|im_system|>' + (m.name or m.role) + '<|im_middle|>' + (m.tool_call_id or '') + m.content }}<|im_end|>",
        "{{ '<|im_assistant|>assistant<|im_middle|>' }}",
    ),
}
ENDS = {"minimax_m2": "[e~[\n", "kimi_k2": "<|im_end|>"}
