"""LangChain: a chain, its stream and a batch, over pd-cluster's OpenAI-compatible API.

pip install langchain-openai
python docs/examples/langchain_client.py http://127.0.0.1:8000
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = sys.argv[2] if len(sys.argv) > 2 else "demo_model"

llm = ChatOpenAI(base_url=f"{url}/v1", api_key="not checked", model=model, temperature=0, max_tokens=32)
prompt = ChatPromptTemplate.from_messages([("user", "Mira 4831. Oskar 2210. Lena 7745. {name}?")])
chain = prompt | llm | StrOutputParser()

print("answer:", chain.invoke({"name": "Oskar"}))
print("stream: ", end="")
for text in chain.stream({"name": "Lena"}):
    print(text, end="", flush=True)
print("\nbatch:", chain.batch([{"name": name} for name in ("Mira", "Oskar", "Lena")]))
