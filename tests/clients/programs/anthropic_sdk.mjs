// Anthropic's SDK for Node: messages by hand, or its tool runner.
import Anthropic from "@anthropic-ai/sdk";

const prices = { tea: 3, cake: 4 };
const tool = {
  name: "price",
  description: "What an item costs.",
  input_schema: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
};
const client = new Anthropic();
const settings = { model: "policy", max_tokens: 1000, system: "You keep a shop." };
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const print = (message) => console.log(JSON.stringify(textOf(message)));

async function byHand() {
  const messages = [];
  const ask = async (content, stream = false) => {
    messages.push({ role: "user", content });
    const body = { ...settings, messages, tools: [tool] };
    const message = stream ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    messages.push({ role: "assistant", content: message.content });
    return message;
  };
  print(await ask("Who are you?"));
  print(await ask("Say a verse.", true));
  const { content } = await ask("What do tea and cake cost?", true);
  const calls = content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({
    type: "tool_result",
    tool_use_id: call.id,
    content: String(prices[call.input.item]),
  }));
  print(await ask(results));
  print(await ask("Thank you."));
}

async function runner() {
  const runnable = { ...tool, type: "custom", run: ({ item }) => String(prices[item]), parse: (input) => input };
  const messages = [{ role: "user", content: "What do tea and cake cost?" }];
  print(await client.beta.messages.toolRunner({ ...settings, messages, tools: [runnable] }));
}

await (process.argv[2] === "messages" ? byHand() : runner());
