"""Ask a running cluster a question; the answer is in the prompt. `helm test` runs this; Python's library is enough.

ask.py URL [WORDS THAT THE ANSWER MUST HOLD]. Exit status: 0 answered well, 1 not.
"""

import json
import os
import ssl
import sys
import urllib.request

QUESTION = "Mira 4831. Oskar 2210. Lena 7745. Oskar?"
DEADLINE_S = 120.0
# The certificate is of the public name, not of the Service
UNVERIFIED = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), UNVERIFIED)


def ask(url: str) -> tuple[str, str, str]:
    """The answer, and which nodes prefilled and decoded. Raises OSError when the cluster does not answer with 200."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PD_API_KEY"):
        headers["Authorization"] = f"Bearer {key.strip()}"
    models = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with DIRECT.open(models, timeout=DEADLINE_S) as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "temperature": 0,
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with DIRECT.open(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
        return answer, response.headers.get("x-pd-prefill", "?"), response.headers.get("x-pd-decode", "?")


def main(arguments: list[str]) -> int:
    url, expected = arguments[0], arguments[1] if len(arguments) > 1 else ""
    try:
        answer, prefill, decode = ask(url.rstrip("/"))
    except (OSError, KeyError, IndexError, ValueError) as error:
        sys.stderr.write(f"{url} did not answer: {error!r}\n")
        return 1
    sys.stdout.write(f"{QUESTION} -> {answer!r} (prefilled by {prefill}, decoded by {decode})\n")
    if not answer.strip() or expected not in answer:
        sys.stderr.write(f"expected {expected or 'some text'!r}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
