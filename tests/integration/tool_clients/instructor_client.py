"""instructor: a model of pydantic by a tool that must be called, and by a JSON schema."""

import sys

import instructor
import openai
import pydantic

url, route = sys.argv[1:]


class Sum(pydantic.BaseModel):
    """Two numbers to add."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or this small model goes on with members of its own

    a: int = pydantic.Field(ge=0, le=9999)
    b: int = pydantic.Field(ge=0, le=9999)


plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers={"x-pd-route": route})
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    given = client.chat.completions.create(
        model="tool_model", temperature=0, max_tokens=80, max_retries=0, response_model=Sum,
        messages=[{"role": "user", "content": "Add 17 and 25."}],
    )  # fmt: skip
    print(type(given).__name__, all(0 <= one <= 9999 for one in (given.a, given.b)))
