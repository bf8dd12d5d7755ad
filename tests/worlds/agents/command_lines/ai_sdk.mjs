#!/usr/bin/env node
// An agent of the AI SDK. Its default provider uses the Responses API and refers to items by their ids.
import { writeFileSync } from "node:fs";
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const write = tool({
  description: "Write the note.",
  inputSchema: z.object({ text: z.string() }),
  execute: async ({ text }) => {
    writeFileSync("note.txt", text);
    return "written";
  },
});
const { text } = await generateText({
  model: openai("policy"),
  prompt: process.argv[2],
  tools: { write },
  stopWhen: stepCountIs(4),
});
console.log(text);
