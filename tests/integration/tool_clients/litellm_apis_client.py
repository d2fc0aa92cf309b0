"""litellm's Messages and Responses: a tool is called, its result goes back, the answer comes; whole and streamed.

`anthropic/` sends /v1/messages, also for a chat request, which litellm translates; `openai/` sends /v1/responses.
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the Internet for prices
import litellm

url, route = sys.argv[1:]
litellm.suppress_debug_info = True  # it prints on stdout
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
RESULT = "sunny, 21 degrees"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city."}
CHAT_TOOLS = [{"type": "function", "function": WEATHER | {"parameters": CITY}}]
COMMON = {"api_key": "none", "temperature": 0, "extra_headers": {"x-pd-route": route}}


def chat(streamed):
    """A chat request that litellm sends to /v1/messages."""
    common = COMMON | {
        "model": "anthropic/tool_model", "api_base": url, "max_tokens": 80, "tools": CHAT_TOOLS
    }  # fmt: skip
    answer = litellm.completion(messages=[ASKED], stream=streamed, **common)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=[ASKED])
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    # with content "" litellm writes a sentence of its own into it
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    shown = [said, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = litellm.completion(messages=[ASKED, *shown], **common)
    return call.function.name, json.loads(call.function.arguments), last.choices[0].message.content


def messages(streamed):
    common = COMMON | {
        "model": "anthropic/tool_model", "api_base": url, "max_tokens": 80,
        "tools": [WEATHER | {"input_schema": CITY}],
    }  # fmt: skip

    async def whole(asked):
        return await litellm.anthropic.messages.acreate(messages=asked, **common)

    async def in_events(asked):
        texts, use = {}, None
        events = b""
        async for chunk in await litellm.anthropic.messages.acreate(messages=asked, stream=True, **common):
            events += chunk
        for line in events.decode().splitlines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                use = event["content_block"] | {"index": event["index"]}
            if event["type"] == "content_block_delta":
                piece = event["delta"].get("partial_json", "")
                texts[event["index"]] = texts.get(event["index"], "") + piece
        use["input"] = json.loads(texts[use.pop("index")])
        return {"content": [use]}

    first = asyncio.run(in_events([ASKED]) if streamed else whole([ASKED]))
    use = next(block for block in first["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": RESULT}
    turns = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    last = asyncio.run(whole([ASKED, *turns]))
    return use["name"], use["input"], last["content"][0]["text"]


def responses(streamed):
    common = COMMON | {
        "model": "openai/tool_model", "api_base": f"{url}/v1", "max_output_tokens": 80,
        "tools": [WEATHER | {"type": "function", "parameters": CITY, "strict": False}],
    }  # fmt: skip
    first = litellm.responses(input=[ASKED], stream=streamed, **common)
    if streamed:
        first = next(event for event in first if event.type == "response.completed").response
    call = next(item for item in first.output if item.type == "function_call")
    shown = [item.model_dump() for item in first.output]
    shown.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    last = litellm.responses(input=[ASKED, *shown], **common)
    return call.name, json.loads(call.arguments), last.output[-1].content[0].text


for one in (chat, messages, responses):
    for is_streamed in (False, True):
        print(one.__name__, *one(is_streamed))
