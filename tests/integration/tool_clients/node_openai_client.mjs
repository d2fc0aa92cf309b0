// openai for node, with zod: chat whole, streamed and parsed, tools by hand and by its runner, responses, embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, vectorsUrl, route] = process.argv.slice(2);
const common = { apiKey: "none", maxRetries: 0, defaultHeaders: { "x-pd-route": route } };
const openai = new OpenAI({ baseURL: `${url}/v1`, ...common });
const vectors = new OpenAI({ baseURL: `${vectorsUrl}/v1`, ...common });
const completions = openai.chat.completions;

const Answer = z.object({ text: z.enum(["yes", "no"]) });
const City = z.object({ city: z.string() });
const asked = { role: "user", content: "What is the weather in Paris?" };
const result = "sunny, 21 degrees";
const base = { model: "tool_model", temperature: 0, max_tokens: 80 };
const hello = { ...base, messages: [{ role: "user", content: "Hello" }] };
const weather = { name: "get_weather", description: "The weather in a city.", parameters: City };

async function chat() {
  const whole = await completions.create(hello);
  const texts = [];
  let usage = null;
  const stream = await completions.create({ ...hello, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    texts.push(chunk.choices[0]?.delta.content ?? "");
    usage = chunk.usage ?? usage;
  }
  const [choice] = whole.choices;
  assert.equal(texts.join(""), choice.message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.ok(texts.filter((text) => text).length > 1, "the answer came in pieces");
  return [choice.finish_reason, choice.message.content];
}

async function parse() {
  const wanted = { ...hello, response_format: zodResponseFormat(Answer, "answer") };
  const whole = (await completions.parse(wanted)).choices[0].message;
  const streamed = (await completions.stream(wanted).finalChatCompletion()).choices[0].message;
  assert.deepEqual(streamed.parsed, whole.parsed);
  return [Answer.safeParse(whole.parsed).success];
}

// The runner of the package would call the function: here each turn is sent by hand.
async function tools(streamed) {
  const body = { ...base, tools: [zodFunction(weather)] };
  const ask = async (messages) =>
    streamed
      ? (await completions.stream({ ...body, messages }).finalChatCompletion()).choices[0]
      : (await completions.parse({ ...body, messages })).choices[0];
  const first = await ask([asked]);
  const [call] = first.message.tool_calls;
  const back = { role: "tool", tool_call_id: call.id, content: result };
  const last = await ask([asked, { role: "assistant", content: null, tool_calls: first.message.tool_calls }, back]);
  return [first.finish_reason, call.function.name, call.function.parsed_arguments.city, last.message.content];
}

async function runner(streamed) {
  const cities = [];
  const call = ({ city }) => {
    cities.push(city);
    return result;
  };
  const tool = zodFunction({ ...weather, function: call });
  const run = completions.runTools({ ...base, messages: [asked], tools: [tool], stream: streamed });
  return [await run.finalContent(), ...cities];
}

async function responses() {
  const body = { model: "tool_model", temperature: 0, max_output_tokens: 80, input: "Hello", store: false };
  const whole = await openai.responses.create(body);
  const texts = [];
  for await (const event of await openai.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") texts.push(event.delta);
  }
  assert.equal(texts.join(""), whole.output_text);
  const wanted = { ...body, text: { format: zodTextFormat(Answer, "answer") } };
  const parsed = (await openai.responses.parse(wanted)).output_parsed;
  const streamed = await openai.responses.stream(wanted).finalResponse();
  assert.deepEqual(streamed.output_parsed, parsed);
  return [whole.status, whole.output_text, Answer.safeParse(parsed).success];
}

async function embeddings() {
  const body = { model: (await vectors.models.list()).data[0].id, input: ["Hello", "Where are you?"] };
  const encoded = await vectors.embeddings.create(body); // the package asks for base64 and decodes it
  const floats = await vectors.embeddings.create({ ...body, encoding_format: "float" });
  for (const [at, one] of encoded.data.entries()) {
    assert.equal(one.embedding.length, floats.data[at].embedding.length);
    assert.ok(one.embedding.every((x, i) => Math.abs(x - floats.data[at].embedding[i]) < 1e-6));
    assert.ok(Math.abs(Math.hypot(...one.embedding) - 1) < 1e-4);
  }
  assert.notDeepEqual(encoded.data[0].embedding, encoded.data[1].embedding);
  return [encoded.data.length, encoded.usage.prompt_tokens === floats.usage.prompt_tokens];
}

async function refusals() {
  const names = [];
  for (const ask of [
    () => completions.create({ ...hello, model: "other" }),
    () => completions.create({ ...hello, temperature: -1 }),
    () => completions.create({ ...hello, temperature: -1, stream: true }),
    () => openai.embeddings.create({ model: "tool_model", input: "Hello" }),
  ]) {
    await ask().then(
      () => names.push("answered"),
      (error) => names.push(`${error.constructor.name} ${error.status} ${error.param}`),
    );
  }
  return names;
}

async function leaving() {
  const stream = await completions.create({ ...hello, max_tokens: 3000, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) break; // ends the connection
  }
  return [stream.controller.signal.aborted];
}

for (const [ask, ...options] of [
  [chat], [parse], [tools, false], [tools, true], [runner, false], [runner, true], [responses], [embeddings], [refusals],
  [leaving],
]) {
  console.log(ask.name, ...(await ask(...options)));
}
