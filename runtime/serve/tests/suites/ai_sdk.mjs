// Vercel's AI SDK talks to a server: texts, streams, tools in several steps, objects, streams to a page, usage, ends.
//
// Usage: node ai_sdk.mjs BASE_URL FOLDER, where FOLDER has node_modules with ai, zod, @ai-sdk/openai,
// @ai-sdk/openai-compatible and @ai-sdk/anthropic. serving.py starts a server with the key "secret".

import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [base, folder] = process.argv.slice(2);
const key = "secret";
const require = createRequire(join(resolve(folder), "index.js"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const ai = await load("ai");
const { z } = await load("zod");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const listed = await fetch(`${base}/v1/models`, { headers: { Authorization: `Bearer ${key}` } });
const name = (await listed.json()).data[0].id;
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: key });
const compatible = createOpenAICompatible({
  name: "samite",
  baseURL: `${base}/v1`,
  apiKey: key,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${base}/v1`, apiKey: key });
const models = {
  chat: openai.chat(name),
  responses: openai.responses(name),
  compatible: compatible.chatModel(name),
  anthropic: anthropic(name),
};

const prompt = "Once upon a time";
const short = { prompt, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
const schema = z.object({ mood: z.enum(["good", "bad"]), n: z.number().int().min(1).max(9) }).strict();
const pick = ai.tool({
  description: "Picks a number",
  inputSchema: z.object({ n: z.number().int().min(1).max(9) }).strict(),
  execute: async ({ n }) => ({ next: n + 1 }),
});
// The model would not call by itself, and then for ever.
const loop = {
  prompt,
  maxOutputTokens: 512,
  maxRetries: 0,
  tools: { pick },
  stopWhen: ai.isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "pick" } }),
};

function check(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

// Cases of a client that its API has no fields for.
const excluded = { "responses, stop": "OpenAI's Responses API has no stop sequences" };

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

function checkSteps(steps) {
  check(steps.length === 2, `${steps.length} steps`);
  const [call] = steps[0].toolCalls;
  check(steps[0].finishReason === "tool-calls" && call.toolName === "pick", steps[0].finishReason);
  check(call.input.n >= 1 && call.input.n <= 9, call);
  check(steps[0].toolResults[0].output.next === call.input.n + 1, steps[0].toolResults);
  check(steps[1].toolCalls.length === 0 && steps[1].text.length > 0, "the second step");
}

const cases = {
  async text(model) {
    const { text, usage, finishReason, response } = await ai.generateText({ model, ...short });
    check(text.length > 0 && finishReason === "length", finishReason);
    check(usage.outputTokens === 12 && usage.inputTokens > 3, usage);
    check(usage.totalTokens === usage.inputTokens + usage.outputTokens, usage);
    check(response.modelId === name && response.id, response.modelId);
  },
  async stream(model) {
    const { text } = await ai.generateText({ model, ...short });
    const result = ai.streamText({ model, ...short });
    check((await all(result.textStream)).join("") === text, "the same text");
    const usage = await result.usage;
    check(usage.outputTokens === 12 && usage.inputTokens > 3, usage);
    check((await result.finishReason) === "length", await result.finishReason);
  },
  async cached(model) {
    const long = { ...short, prompt: "A prompt that comes twice. ".repeat(20) };
    await ai.generateText({ model, ...long });
    const { usage } = await ai.generateText({ model, ...long });
    check(usage.inputTokenDetails.cacheReadTokens > 20, usage);
    check(usage.inputTokens > usage.inputTokenDetails.cacheReadTokens, usage);
  },
  async conversation(model) {
    const messages = [
      { role: "user", content: [{ type: "text", text: "Hello" }] },
      { role: "assistant", content: [{ type: "text", text: "Hello. What is it?" }] },
      { role: "user", content: "A story" },
    ];
    const { prompt, ...rest } = short;
    const { text } = await ai.generateText({ model, ...rest, instructions: "Be brief.", messages });
    check(text.length > 0, "no text");
  },
  // The client may send an answer of the server by its id.
  async remembered(model) {
    const { prompt, ...rest } = { ...short, maxOutputTokens: 40 };
    const ask = { role: "user", content: prompt };
    const first = await ai.generateText({ model, ...rest, messages: [ask] });
    const count = async (messages) => (await ai.generateText({ model, ...rest, messages })).usage.inputTokens;
    const [without, spelled, sent] = [
      await count([ask, ask]),
      await count([ask, { role: "assistant", content: first.text }, ask]),
      await count([ask, ...first.response.messages, ask]),
    ];
    check(sent === spelled && sent > without, [without, spelled, sent]);
  },
  async stop(model) {
    const { text } = await ai.generateText({ model, ...short });
    const at = text.indexOf(" ", 2);
    const cut = await ai.generateText({ model, ...short, stopSequences: [text.slice(at, at + 3)] });
    check(cut.text === text.slice(0, at), [text, cut.text]);
    check(cut.finishReason === "stop", cut.finishReason);
  },
  async steps(model) {
    checkSteps((await ai.generateText({ model, ...loop })).steps);
  },
  async streamedSteps(model) {
    const result = ai.streamText({ model, ...loop });
    const kinds = (await all(result.stream ?? result.fullStream)).map(({ type }) => type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "finish"]) {
      check(kinds.includes(kind), `no ${kind} in ${[...new Set(kinds)]}`);
    }
    checkSteps(await result.steps);
  },
  async object(model) {
    const asked = { model, prompt, maxOutputTokens: 256, maxRetries: 0, output: ai.Output.object({ schema }) };
    check(schema.safeParse((await ai.generateText(asked)).output).success, "the object");
    const result = ai.streamText(asked);
    const partial = await all(result.partialOutputStream);
    check(partial.length > 0 && schema.safeParse(await result.output).success, "the streamed object");
    const { object } = await ai.generateObject({ model, prompt, maxOutputTokens: 256, maxRetries: 0, schema });
    check(schema.safeParse(object).success, object);
  },
  async choice(model) {
    const output = ai.Output.choice({ options: ["good", "bad"] });
    const asked = { model, prompt, maxOutputTokens: 256, maxRetries: 0, output };
    check(["good", "bad"].includes((await ai.generateText(asked)).output), "the choice");
  },
  async array(model) {
    const output = ai.Output.array({ element: schema });
    const asked = { model, prompt, maxOutputTokens: 1024, maxRetries: 0, output };
    const { output: list } = await ai.generateText(asked);
    check(Array.isArray(list) && list.every((one) => schema.safeParse(one).success), list);
  },
  async page(model) {
    const result = ai.streamText({ model, ...loop });
    const response = ai.createUIMessageStreamResponse({
      stream: ai.toUIMessageStream({ stream: result.stream, tools: loop.tools }),
    });
    check(response.headers.get("content-type") === "text/event-stream", response.headers.get("content-type"));
    const lines = (await response.text()).split("\n").filter((line) => line.startsWith("data: "));
    check(lines.at(-1) === "data: [DONE]", lines.at(-1));
    const kinds = lines.slice(0, -1).map((line) => JSON.parse(line.slice(6)).type);
    for (const kind of ["start", "tool-input-available", "tool-output-available", "text-delta", "finish"]) {
      check(kinds.includes(kind), `no ${kind} in ${[...new Set(kinds)]}`);
    }
    check(!kinds.includes("error"), "an error");
  },
  async history(model) {
    const first = await ai.generateText({ model, ...loop });
    const ask = { role: "user", content: prompt };
    const messages = [ask, ...first.response.messages, { role: "user", content: "Go on" }];
    const { text } = await ai.generateText({ model, messages, tools: { pick }, maxOutputTokens: 8, maxRetries: 0 });
    check(typeof text === "string", text);
  },
  async ended(model) {
    const end = new AbortController();
    const parts = [];
    const result = ai.streamText({
      model,
      ...short,
      maxOutputTokens: 100000,
      abortSignal: end.signal,
      onError: ({ error }) => parts.push(String(error)),
    });
    for await (const part of result.stream ?? result.fullStream) {
      parts.push(part.type);
      if (part.type === "text-delta") end.abort();
    }
    check(parts.includes("abort") || parts.some((part) => part.includes("Abort")), [...new Set(parts)]);
    for (let i = 0; ; i++) {
      const slots = await (await fetch(`${base}/slots`, { headers: { Authorization: `Bearer ${key}` } })).json();
      if (slots.every((slot) => !slot.is_processing)) break;
      check(i < 50, "the server goes on");
      await new Promise((done) => setTimeout(done, 100));
    }
  },
  async refused(model) {
    try {
      await ai.generateText({ model, ...short, prompt: "once ".repeat(20000) });
    } catch (error) {
      check(error.statusCode === 400 && !error.isRetryable, error.statusCode ?? error);
      check(/context|too long/.test(error.message), error.message);
      return;
    }
    throw new Error("a prompt that does not fit was taken");
  },
};

// What only OpenAI's own APIs have.
const ofOpenAI = {
  async probabilities(model) {
    const providerOptions = { openai: { logprobs: 2 } };
    const { providerMetadata } = await ai.generateText({ model, ...short, providerOptions });
    const found = providerMetadata.openai.logprobs?.flat() ?? [];
    check(found.length === 12 && found.every((one) => one.top_logprobs.length === 2), providerMetadata);
  },
  async allowed(model) {
    const tools = { a: pick, b: pick, c: pick };
    const providerOptions = { openai: { allowedTools: { toolNames: ["b", "c"], mode: "required" } } };
    const asked = { model, prompt, tools, toolChoice: "required", maxOutputTokens: 1024, maxRetries: 0 };
    const { toolCalls } = await ai.generateText({ ...asked, providerOptions });
    check(toolCalls.length > 0 && toolCalls.every(({ toolName }) => "bc".includes(toolName)), toolCalls);
  },
};

async function embeddings() {
  const model = openai.embedding(name);
  const { embeddings, usage } = await ai.embedMany({ model, values: ["a cat", "a dog", "a tree"], maxRetries: 0 });
  check(embeddings.length === 3 && usage.tokens > 0, usage);
  check(Math.abs(ai.cosineSimilarity(embeddings[0], embeddings[0]) - 1) < 1e-3, "the similarity");
}

let passed = 0;
let failed = 0;
let skipped = 0;
async function run(what, body) {
  if (what in excluded) {
    skipped += 1;
    return;
  }
  try {
    await body();
    passed += 1;
  } catch (error) {
    failed += 1;
    console.log(`${what}: ${error?.stack?.split("\n").slice(0, 3).join(" ") ?? error}`);
    if (error?.responseBody) console.log(`  ${error.responseBody.slice(0, 300)}`);
  }
}

globalThis.AI_SDK_LOG_WARNINGS = false;
for (const [kind, model] of Object.entries(models)) {
  for (const [what, body] of Object.entries(cases)) await run(`${kind}, ${what}`, () => body(model));
}
await run("chat, probabilities", () => ofOpenAI.probabilities(models.chat));
await run("responses, probabilities", () => ofOpenAI.probabilities(models.responses));
await run("responses, allowed", () => ofOpenAI.allowed(models.responses));
await run("embeddings", embeddings);
console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
process.exitCode = failed ? 1 : 0;
