// Vercel's AI SDK: its tool loop over each of its providers for our dialects.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const models = { chat: openai.chat, responses: openai.responses, messages: anthropic };
const price = tool({
  description: "What an item costs.",
  inputSchema: z.object({ item: z.string() }),
  execute: async ({ item }) => ({ tea: 3, cake: 4 })[item],
});
const messages = [];
for (const content of ["Who are you?", "Say a verse.", "What do tea and cake cost?", "Thank you."]) {
  messages.push({ role: "user", content });
  const settings = {
    model: models[process.argv[2]]("policy"),
    instructions: "You keep a shop.",
    messages,
    tools: { price },
    stopWhen: isStepCount(5),
  };
  const result = content.includes("Thank") || content.includes("Who") ? await generateText(settings) : streamText(settings);
  console.log(JSON.stringify(await result.text));
  messages.push(...(await result.responseMessages));
}
