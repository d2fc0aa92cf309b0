// The AI SDK by each of its providers: a tool is called, its result goes back, the answer comes; whole and streamed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [url, route] = process.argv.slice(2);
const common = { baseURL: `${url}/v1`, apiKey: "none", headers: { "x-pd-route": route } };
const openai = createOpenAI(common);
const models = {
  chat: openai.chat("tool_model"),
  responses: openai("tool_model"),
  compatible: createOpenAICompatible({ name: "local", ...common })("tool_model"),
  messages: createAnthropic(common)("tool_model"),
};
const cities = [];
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return "sunny, 21 degrees";
  },
});

for (const [name, model] of Object.entries(models)) {
  const body = {
    model,
    prompt: "What is the weather in Paris?",
    tools: { get_weather: weather },
    stopWhen: stepCountIs(2),
    temperature: 0,
    maxOutputTokens: 80,
    maxRetries: 0,
    providerOptions: { openai: { store: false } }, // else later turns name what a server has stored
  };
  console.log(name, (await generateText(body)).text, cities.pop());
  const stream = streamText(body);
  await stream.consumeStream();
  console.log(name, (await stream.text), cities.pop());
}
