// The openai package of npm: a JSON object a line in says the step, a JSON value a line out tells.
import OpenAI from "openai";
import { createInterface } from "node:readline";

const connect = (url, key) => new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });

let opened;

const steps = {
  async create({ url, key, ...request }) {
    return told(await connect(url, key).chat.completions.create(request));
  },

  async stream({ url, key, ...request }) {
    const body = { ...request, stream: true, stream_options: { include_usage: true } };
    const stream = await connect(url, key).chat.completions.create(body);
    const all = { text: "", reasoning: "", chunks: 0 };
    for await (const chunk of stream) {
      all.chunks += 1;
      for (const { delta, finish_reason } of chunk.choices) {
        all.text += delta.content ?? "";
        all.reasoning += delta.reasoning_content ?? "";
        all.finish = finish_reason;
      }
      if (chunk.usage) Object.assign(all, counted(chunk.usage));
    }
    return all;
  },

  async helper({ url, key, ...request }) {
    const runner = connect(url, key).chat.completions.stream({
      ...request,
      stream_options: { include_usage: true },
    });
    let [heard, reasoning] = ["", ""]; // the helper joins no fields but OpenAI's own
    runner.on("content", (piece) => (heard += piece));
    runner.on("chunk", ({ choices }) => (reasoning += choices[0]?.delta.reasoning_content ?? ""));
    return { ...told(await runner.finalChatCompletion()), heard, reasoning };
  },

  async open({ url, key, chunks, ...request }) {
    opened = await connect(url, key).chat.completions.create({ ...request, stream: true });
    const iterator = opened[Symbol.asyncIterator]();
    for (let i = 0; i < chunks; i += 1) await iterator.next();
    return chunks;
  },

  async close() {
    opened.controller.abort();
    return "closed";
  },

  async headers({ url, key, ...request }) {
    const { response, request_id } = await connect(url, key)
      .chat.completions.create(request)
      .withResponse();
    return { ...Object.fromEntries(response.headers), sdk_request_id: request_id };
  },

  async tools({ url, key, ...request }) {
    const { choices } = await connect(url, key).chat.completions.create(request);
    return called(choices[0]);
  },

  async streamed_tools({ url, key, ...request }) {
    const runner = connect(url, key).chat.completions.stream(request);
    return called((await runner.finalChatCompletion()).choices[0]);
  },

  async completion({ url, key, ...request }) {
    const { choices, usage } = await connect(url, key).completions.create(request);
    return { text: choices[0].text, finish: choices[0].finish_reason, ...counted(usage) };
  },

  async response({ url, key, ...request }) {
    const runner = connect(url, key).responses.stream(request);
    const kinds = [];
    for await (const { type } of runner) if (!kinds.includes(type)) kinds.push(type);
    const final = await runner.finalResponse();
    const items = final.output.map((item) => item.type);
    return { text: final.output_text, status: final.status, items, kinds };
  },

  async models({ url, key }) {
    const ids = [];
    for await (const model of connect(url, key).models.list()) ids.push(model.id);
    return ids;
  },
};

function told({ choices, usage, model }) {
  const { message, finish_reason } = choices[0];
  const { content, reasoning_content } = message;
  const more = { finish: finish_reason, model, ...counted(usage) };
  return { text: content, reasoning: reasoning_content, ...more };
}

function counted(usage) {
  return { prompt_tokens: usage?.prompt_tokens, completion_tokens: usage?.completion_tokens };
}

function called({ message, finish_reason }) {
  const calls = (message.tool_calls ?? []).map((call) => ({
    name: call.function.name,
    arguments: JSON.parse(call.function.arguments),
  }));
  return { calls, finish: finish_reason };
}

function raised(error) {
  const kinds = [];
  for (let kind = error.constructor; kind?.name; kind = Object.getPrototypeOf(kind)) {
    kinds.push(kind.name);
  }
  const packages = [error instanceof OpenAI.OpenAIError ? "openai" : ""];
  return { raised: kinds, packages, status: error.status ?? null, message: error.message };
}

for await (const line of createInterface({ input: process.stdin })) {
  const { step, ...given } = JSON.parse(line);
  const result = await steps[step](given).catch(raised);
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
process.exit(0);
