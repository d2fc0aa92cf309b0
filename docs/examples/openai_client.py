"""OpenAI's own Python client: a chat, a stream with its usage, several samples with log probabilities, an error.

pip install openai
python docs/examples/openai_client.py http://127.0.0.1:8000
"""

import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = openai.OpenAI(base_url=f"{url}/v1", api_key="not checked")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Mira 4831. Oskar 2210. Lena 7745. Oskar?"}]

# One answer. Its headers name the nodes that did the work.
raw = client.chat.completions.with_raw_response.create(model=model, messages=question, max_tokens=32, temperature=0)
print("answer:", raw.parse().choices[0].message.content)
print("nodes:", raw.headers["x-pd-prefill"], "->", raw.headers["x-pd-decode"])

# A stream. Its last chunk tells tokens, and what the request waited for (include_timings is ours).
stream = client.chat.completions.create(
    model=model,
    messages=question,
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True, "include_timings": True},
)
print("stream: ", end="")
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print("\ntokens:", chunk.usage.prompt_tokens, "in,", chunk.usage.completion_tokens, "out")
        print("timings in ms:", chunk.usage.model_extra["timings"])

# Three samples that a seed repeats, with the log probability of each token. top_k is no field of OpenAI's API.
sampled = client.completions.create(
    model=model,
    prompt="Once upon a time",
    max_tokens=8,
    n=3,
    temperature=1.2,
    seed=7,
    logprobs=1,
    extra_body={"top_k": 50},
)
for choice in sampled.choices:
    print("sample:", repr(choice.text), [round(logprob, 2) for logprob in choice.logprobs.token_logprobs])

# A mistake is the client's own exception, which names the field.
try:
    client.chat.completions.create(model=model, messages=question, temperature=-1)
except openai.BadRequestError as error:
    print("refused:", error.param)
