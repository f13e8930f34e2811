// OpenAI's SDK for Node: a conversation with tools in Chat Completions or Responses.
import OpenAI from "openai";

const prices = { tea: 3, cake: 4 };
const fields = {
  name: "price",
  description: "What an item costs.",
  parameters: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
};
const client = new OpenAI();
const print = (text) => console.log(JSON.stringify(text));
const result = (call) => String(prices[JSON.parse(call.arguments).item]);

async function chat() {
  const messages = [{ role: "system", content: "You keep a shop." }];
  const ask = async (added, stream = false) => {
    messages.push(...added);
    const body = { model: "policy", messages, tools: [{ type: "function", function: fields }] };
    const completion = stream
      ? await client.chat.completions.stream(body).finalChatCompletion()
      : await client.chat.completions.create(body);
    const { message } = completion.choices[0];
    messages.push(message);
    return message;
  };
  const user = (content) => [{ role: "user", content }];
  print((await ask(user("Who are you?"))).content);
  print((await ask(user("Say a verse."), true)).content);
  const { tool_calls } = await ask(user("What do tea and cake cost?"), true);
  const results = tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: result(call.function) }));
  print((await ask(results)).content);
  print((await ask(user("Thank you."))).content);
}

async function responses(stored) {
  const items = [];
  let last;
  const ask = async (added, stream = false) => {
    items.push(...added);
    const state = stored && last ? { input: added, previous_response_id: last } : { input: items };
    const tools = [{ type: "function", ...fields }];
    const body = { model: "policy", instructions: "You keep a shop.", tools, ...state };
    const response = stream ? await client.responses.stream(body).finalResponse() : await client.responses.create(body);
    items.push(...response.output);
    last = response.id;
    return response;
  };
  const user = (content) => [{ role: "user", content }];
  print((await ask(user("Who are you?"))).output_text);
  print((await ask(user("Say a verse."), true)).output_text);
  const { output } = await ask(user("What do tea and cake cost?"), true);
  const calls = output.filter((item) => item.type === "function_call");
  const results = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: result(call) }));
  print((await ask(results)).output_text);
  print((await ask(user("Thank you."))).output_text);
}

const mode = process.argv[2];
await (mode === "chat" ? chat() : responses(mode.endsWith("stored")));
