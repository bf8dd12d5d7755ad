#!/usr/bin/env node
// The AI SDK with its default provider: Responses, whose items it refers to by their ids.
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
