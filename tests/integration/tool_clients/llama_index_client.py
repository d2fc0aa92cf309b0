"""llama-index: a tool is called, its result goes back, the answer comes."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, route = sys.argv[1:]


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny, 21 degrees"


llm = OpenAILike(
    model="tool_model", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
    temperature=0, max_tokens=80, default_headers={"x-pd-route": route},
)  # fmt: skip
tool = FunctionTool.from_defaults(get_weather)
question = ChatMessage("What is the weather in Paris?", role="user")
for _ in range(2):
    called = llm.chat_with_tools([tool], chat_history=[question])
    (call,) = llm.get_tool_calls_from_response(called)
    result = ChatMessage(
        tool(**call.tool_kwargs).content, role="tool", additional_kwargs={"tool_call_id": call.tool_id}
    )
    last = llm.chat_with_tools([tool], chat_history=[question, called.message, result])
    print(call.tool_name, call.tool_kwargs, last.message.content)
