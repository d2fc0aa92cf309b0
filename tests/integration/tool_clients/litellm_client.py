"""litellm: a tool is called, its result goes back, the answer comes; whole and streamed."""

import json
import sys

import litellm

url, route = sys.argv[1:]
litellm.suppress_debug_info = True  # it prints on stdout
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
for streamed in (False, True):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    common = {
        "model": "openai/tool_model", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 80,
        "tools": tools, "extra_headers": {"x-pd-route": route},
    }  # fmt: skip
    answer = litellm.completion(messages=messages, stream=streamed, **common)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    last = litellm.completion(messages=messages, **common)
    print(call.function.name, arguments, last.choices[0].message.content)
