// Lists with filters: tasks and their rollouts, sessions, and the journal's trajectories.

import { ask, Refused } from "./api";
import { Child, fill, h, moment, on, significant, words } from "./dom";

type Line = Record<string, unknown>;

interface Filter {
  name: string;
  label: string;
  /** The choices; without them, the filter is a text field. */
  values?: string[];
}

interface Head {
  label: string;
  isNumber?: boolean;
  cell: (line: Line) => Child;
}

export interface ListSpec {
  path: string;
  /** The field of the answer that contains the lines. */
  lines: string;
  title: string;
  none: string;
  filters: Filter[];
  heads: Head[];
}

const text = (value: unknown): string =>
  value === null || value === undefined ? "" : String(value);
const number = (value: unknown): string => (typeof value === "number" ? significant(value) : "");
const time = (value: unknown): string => (typeof value === "number" ? moment(value).replace(" UTC", "") : "");
const counts = (value: unknown): string =>
  Object.entries((value ?? {}) as Record<string, number>)
    .map(([name, count]) => `${count} ${words(name)}`)
    .join(", ");
const span = (value: unknown): string => {
  const [low, high] = (value ?? []) as number[];
  return low === undefined ? "" : low === high ? String(low) : `${low} to ${high}`;
};
const plain = (label: string, name: string): Head => ({ label, cell: (line) => text(line[name]) });
const numeric = (label: string, name: string): Head => ({
  label,
  isNumber: true,
  cell: (line) => number(line[name]),
});
const link = (route: string, value: unknown): Child =>
  h("a", { href: `#/${route}/${encodeURIComponent(text(value))}` }, text(value));

const OUTCOMES = [
  "completed", "truncated_tokens", "truncated_context", "max_turns", "malformed_tool_call",
  "wall_timeout", "stale", "cancelled", "agent_error", "environment_error",
  "infrastructure_error", "reward_error", "empty", "token_misaligned",
];

export const LISTS: Record<string, ListSpec> = {
  rollouts: {
    path: "rollouts",
    lines: "rollouts",
    title: "Tasks and their rollouts",
    none: "No task matches.",
    filters: [
      { name: "status", label: "status", values: ["queued", "running", "finished", "trained", "evicted", "cancelled"] },
      { name: "environment", label: "environment" },
      { name: "batch", label: "batch" },
    ],
    heads: [
      { label: "task", cell: (line) => link("rollouts", line.id) },
      plain("status", "status"),
      plain("environment", "environment"),
      plain("batch", "batch"),
      numeric("rollouts", "num_samples"),
      numeric("reward", "reward"),
      { label: "outcomes", cell: (line) => counts(line.outcomes) },
      { label: "versions", cell: (line) => span(line.policy_versions) },
      { label: "accepted, UTC", cell: (line) => time(line.accepted_at) },
    ],
  },
  sessions: {
    path: "sessions",
    lines: "sessions",
    title: "Sessions",
    none: "No session matches.",
    filters: [
      { name: "status", label: "status", values: ["queued", "open", "finished", "discarded", "expired"] },
      { name: "group", label: "group" },
    ],
    heads: [
      plain("session", "id"),
      { label: "group", cell: (line) => link("rollouts", line.group) },
      plain("status", "status"),
      numeric("reward", "reward"),
      plain("outcome", "outcome"),
      { label: "created, UTC", cell: (line) => time(line.created_at) },
      { label: "ended, UTC", cell: (line) => time(line.ended_at) },
    ],
  },
  trajectories: {
    path: "journal",
    lines: "trajectories",
    title: "Trajectories of the journal",
    none: "The journal contains no trajectory that matches.",
    filters: [
      { name: "step", label: "step" },
      { name: "task", label: "task" },
      { name: "outcome", label: "outcome", values: OUTCOMES },
    ],
    heads: [
      numeric("step", "step"),
      { label: "trajectory", cell: (line) => link("trajectories", line.id) },
      plain("task", "task"),
      plain("outcome", "outcome"),
      numeric("return", "episode_return"),
      plain("advantage", "advantage"),
      numeric("turns", "num_turns"),
      { label: "tokens trained", isNumber: true, cell: (line) => `${line.num_trained}/${line.num_sampled}` },
      plain("ledger", "ledger"),
    ],
  },
};

/** A list on the page. When a filter changes, it is requested again. */
export class ListView {
  private readonly rows = h("div", { class: "table card list" });
  private readonly more = h("button", { type: "button", class: "more", hidden: true }, "more");
  private readonly chosen: Record<string, string> = {};
  private lines: Line[] = [];
  private next: string | number | null = null;
  private request = new AbortController();

  constructor(
    private readonly root: HTMLElement,
    private readonly spec: ListSpec,
    private readonly failed: (error: unknown) => void,
    preset: Record<string, string> = {},
  ) {
    Object.assign(this.chosen, preset);
    on(this.more, { click: () => void this.load(false) });
    const form = on(h("form", { class: "filters" }, ...spec.filters.map((each) => this.filter(each))), {
      submit: (event) => event.preventDefault(),
    });
    fill(root, h("h2", {}, spec.title), form, this.rows, this.more);
    void this.load(true);
  }

  close(): void {
    this.request.abort();
    fill(this.root);
  }

  private filter({ name, label, values }: Filter): HTMLElement {
    const changed = (value: string) => {
      this.chosen[name] = value.trim();
      void this.load(true);
    };
    if (values && values.length) {
      const options = ["", ...values].map((value) =>
        h("option", { value, selected: value === (this.chosen[name] ?? "") }, value ? words(value) : "any"),
      );
      const select = h("select", { name }, ...options);
      return h("label", {}, label, on(select, { change: () => changed(select.value) }));
    }
    const input = h("input", { name, type: "search", value: this.chosen[name] ?? "", placeholder: "any" });
    return h("label", {}, label, on(input, { change: () => changed(input.value) }));
  }

  private async load(isFirstPage: boolean): Promise<void> {
    this.request.abort();
    this.request = new AbortController();
    const cursor = isFirstPage ? null : this.next;
    try {
      const answer = await ask<Line>(
        this.spec.path,
        { ...this.chosen, cursor, limit: 50 },
        this.request.signal,
      );
      const found = (answer[this.spec.lines] ?? []) as Line[];
      this.lines = isFirstPage ? found : [...this.lines, ...found];
      this.next = (answer.next ?? null) as string | number | null;
      this.draw();
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") return;
      if (error instanceof Refused && [404, 405].includes(error.status)) {
        fill(this.rows, h("p", { class: "missing" }, "This run does not have this list."));
      } else if (error instanceof Refused && error.status === 422) {
        fill(this.rows, h("p", { class: "missing" }, error.message));
      } else {
        this.failed(error);
      }
      this.more.hidden = true;
    }
  }

  private draw(): void {
    const { heads, none } = this.spec;
    this.more.hidden = this.next === null;
    if (!this.lines.length) {
      fill(this.rows, h("p", { class: "missing" }, none));
      return;
    }
    const cell = (tag: "td" | "th", head: Head, ...inside: Child[]) =>
      h(tag, { class: head.isNumber ? null : "words", scope: tag === "th" ? "col" : null }, ...inside);
    fill(
      this.rows,
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...heads.map((head) => cell("th", head, head.label)))),
        h(
          "tbody",
          {},
          ...this.lines.map((line) =>
            h("tr", {}, ...heads.map((head) => cell("td", head, head.cell(line)))),
          ),
        ),
      ),
    );
  }
}

/** Show a task and each of its rollouts. */
export async function showTask(
  root: HTMLElement,
  id: string,
  failed: (error: unknown) => void,
): Promise<void> {
  try {
    const task = await ask<Line>(`rollouts/${encodeURIComponent(id)}`);
    const samples = (task.samples ?? []) as Line[];
    const facts: [string, string][] = [
      ["status", text(task.status)],
      ["environment", text(task.environment)],
      ["place", text(task.place)],
    ];
    const heads = ["rollout", "status", "step", "reward", "outcome", "turns", "tokens", "versions", ""];
    const line = (sample: Line) =>
      h(
        "tr",
        {},
        ...[
          text(sample.index),
          [sample.status, sample.reason].filter(Boolean).map(text).join(": "),
          text(sample.step),
          number(sample.reward),
          text(sample.outcome),
          text(sample.turns),
          text(sample.sampled_tokens),
          span(sample.policy_versions),
        ].map((value) => h("td", { class: "words" }, value)),
        h(
          "td",
          { class: "words" },
          sample.step === null || sample.step === undefined
            ? null
            : h("a", { href: `#/trajectories/${encodeURIComponent(`${id}-${text(sample.index)}`)}` }, "tokens"),
        ),
      );
    fill(
      root,
      h("h2", {}, `Task ${id}`),
      h(
        "dl",
        { class: "facts card" },
        ...facts.filter(([, value]) => value).flatMap(([name, value]): Child[] => [h("dt", {}, name), h("dd", {}, value)]),
      ),
      h(
        "div",
        { class: "table card list" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { class: "words", scope: "col" }, head)))),
          h("tbody", {}, ...samples.map(line)),
        ),
      ),
    );
  } catch (error) {
    failed(error);
  }
}
