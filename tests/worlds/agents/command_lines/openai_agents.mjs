#!/usr/bin/env node
// An agent of openai-agents for JavaScript, which uses the Responses API.
import { writeFileSync } from "node:fs";
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
const write = tool({
  name: "write",
  description: "Write the note.",
  parameters: z.object({ text: z.string() }),
  execute: async ({ text }) => {
    writeFileSync("note.txt", text);
    return "written";
  },
});
const agent = new Agent({ name: "writer", model: "policy", tools: [write] });
console.log((await run(agent, process.argv[2])).finalOutput);
