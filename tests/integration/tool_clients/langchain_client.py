"""langchain-openai: a bound tool is called, its result goes back, the answer comes; whole and streamed."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, route = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny, 21 degrees"


@tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


llm = ChatOpenAI(
    base_url=f"{url}/v1", api_key="none", model="tool_model", temperature=0, max_tokens=80,
    default_headers={"x-pd-route": route},
).bind_tools([get_weather, add])  # fmt: skip
for streamed in (False, True):
    messages = [HumanMessage("What is the weather in Paris?")]
    called = llm.invoke(messages)
    if streamed:
        pieces = list(llm.stream(messages))
        called = sum(pieces[1:], pieces[0])
    (call,) = called.tool_calls
    result = {"get_weather": get_weather, "add": add}[call["name"]].invoke(call["args"])
    messages += [called, ToolMessage(result, tool_call_id=call["id"])]
    print(call["name"], call["args"], llm.invoke(messages).content)
