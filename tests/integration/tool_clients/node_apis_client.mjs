// @anthropic-ai/sdk and openai for node: a tool is called, its result goes back, the answer comes; whole and streamed.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, route] = process.argv.slice(2);
const common = { apiKey: "none", maxRetries: 0, defaultHeaders: { "x-pd-route": route } };
const claude = new Anthropic({ baseURL: url, ...common });
const openai = new OpenAI({ baseURL: `${url}/v1`, ...common });
const asked = { role: "user", content: "What is the weather in Paris?" };
const result = "sunny, 21 degrees";
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "The weather in a city." };

async function messages(streamed) {
  const body = { model: "tool_model", max_tokens: 80, temperature: 0, tools: [{ ...weather, input_schema: city }] };
  const ask = (turns) =>
    streamed
      ? claude.messages.stream({ ...body, messages: turns }).finalMessage()
      : claude.messages.create({ ...body, messages: turns });
  const first = await ask([asked]);
  const use = first.content.find((block) => block.type === "tool_use");
  const back = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: result }] };
  const turns = [asked, { role: "assistant", content: first.content }, back];
  const last = await ask(turns);
  const counted = await claude.messages.countTokens({ model: "tool_model", tools: body.tools, messages: turns });
  const usage = last.usage.input_tokens + last.usage.cache_read_input_tokens;
  return [first.stop_reason, use.name, JSON.stringify(use.input), last.content[0].text, counted.input_tokens === usage];
}

async function responses(streamed) {
  const tools = [{ ...weather, type: "function", parameters: city, strict: false }];
  const body = { model: "tool_model", max_output_tokens: 80, temperature: 0, tools, store: false };
  const ask = (input) =>
    streamed ? openai.responses.stream({ ...body, input }).finalResponse() : openai.responses.create({ ...body, input });
  const first = await ask([asked]);
  const call = first.output.find((item) => item.type === "function_call");
  const back = { type: "function_call_output", call_id: call.call_id, output: result };
  const last = await ask([asked, ...first.output, back]);
  return [first.status, call.name, call.arguments, last.output_text];
}

async function refusals() {
  const image = { type: "image", source: { type: "url", url: "http://example.org/x.png" } };
  const names = [];
  for (const ask of [
    () => claude.messages.create({ model: "tool_model", max_tokens: 5, messages: [{ role: "user", content: [image] }] }),
    () => claude.messages.create({ model: "other", max_tokens: 5, messages: [asked] }),
    () => openai.responses.create({ model: "tool_model", input: "x", previous_response_id: "resp_1" }),
  ]) {
    await ask().then(
      () => names.push("answered"),
      (error) => names.push(`${error.constructor.name} ${error.status}`),
    );
  }
  return names;
}

for (const ask of [messages, responses]) {
  for (const streamed of [false, true]) console.log(ask.name, ...(await ask(streamed)));
}
console.log(...(await refusals()));
