// The view of a trajectory: the tree of its samples, and each token, coloured by one of its columns.

import { Child, fill, h, on, significant } from "./dom";
import type { SampleDocument, Segment, TrajectoryDocument } from "./documents";

type Paint = "kind" | "advantage" | "logprob" | "version";

const PAINTS: [Paint, string][] = [
  ["kind", "mask"],
  ["advantage", "advantage"],
  ["logprob", "log-probability"],
  ["version", "version"],
];
const VERSION_ROLES = ["sky", "yellow", "green", "purple", "orange", "blue"];
/** Number of tokens of a segment that are drawn at first; a button draws more. */
const MOST = 4000;
/** Up to this number of tokens, a prefix that a sample shares with another one is not folded. */
const FEW = 200;

export class TrajectoryView {
  private paint: Paint = "kind";
  private readonly tip = h("div", { class: "columns-tip", hidden: true, role: "status" });
  private readonly body = h("section", { "aria-label": "Tokens" });
  private readonly keys = h("div", { class: "paint-keys" });
  private pinned: HTMLElement | null = null;
  private readonly largest: { advantage: number; logprob: number };
  private readonly versions: number[];

  constructor(
    private readonly root: HTMLElement,
    private readonly doc: TrajectoryDocument,
  ) {
    document.title = `${doc.id}, step ${doc.step}`;
    const all = (read: (sample: SampleDocument) => (number | null)[]) =>
      doc.samples.flatMap((sample) => read(sample).filter((value) => value !== null)) as number[];
    const most = (values: number[]) => values.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
    this.largest = {
      advantage: most(all((sample) => sample.advantages)),
      logprob: most(all((sample) => sample.logprobs)),
    };
    this.versions = [...new Set(all((sample) => sample.versions))].sort((a, b) => a - b);
    fill(root, this.header(), this.facts(), this.tree(), this.legend(), this.body, this.columns(), this.tip);
    this.draw();
    on(this.body, {
      pointerover: (event) => this.point(event.target as HTMLElement),
      pointerout: () => this.point(this.pinned),
      click: (event) => this.pin(event.target as HTMLElement),
    });
    on(root, { keydown: (event) => event.key === "Escape" && this.pin(null) });
  }

  close(): void {
    fill(this.root);
  }

  private header(): HTMLElement {
    const { doc } = this;
    return h(
      "header",
      {},
      h(
        "p",
        { class: "eyebrow" },
        `Rayloom trajectory · step ${doc.step} · group ${doc.group} · task ${doc.task} · ${doc.environment}`,
      ),
      h("h1", {}, doc.id),
    );
  }

  private facts(): HTMLElement {
    const { doc } = this;
    const faults = doc.fault_counts.map(([fault, count]) =>
      h("li", {}, `${count} ${count === 1 ? "token" : "tokens"} in red below: ${fault}`),
    );
    return h(
      "section",
      { "aria-label": "Facts" },
      h(
        "dl",
        { class: "facts card" },
        ...doc.facts.flatMap(([label, value]): Child[] => [h("dt", {}, label), h("dd", {}, value)]),
      ),
      doc.num_faulty ? h("ul", { class: "faults card", "aria-label": "Faults" }, ...faults) : null,
      doc.note ? h("p", { class: "note" }, `Token ids without their text: ${doc.note}.`) : null,
    );
  }

  /** Draw a bar for each sample, as long as its tokens, below the sample whose prefix it shares. */
  private tree(): HTMLElement | null {
    const { samples } = this.doc;
    if (samples.length < 2) return null;
    const longest = samples.reduce((most, sample) => Math.max(most, sample.ids.length), 1);
    const share = (tokens: number) => `${(100 * tokens) / longest}%`;
    const depth = (sample: SampleDocument): number =>
      sample.parent === null ? 0 : 1 + depth(samples[sample.parent]);
    const line = (sample: SampleDocument, number: number) => {
      const parts = sample.segments
        .filter((segment) => segment.end > sample.num_shared)
        .map((segment) => {
          const from = Math.max(segment.start, sample.num_shared);
          const kind = segment.is_reply ? "reply" : "between";
          return h("i", { class: kind, style: `left:${share(from)};width:${share(segment.end - from)}` });
        });
      const shared = sample.num_shared
        ? h("i", { class: "shared", style: `left:0;width:${share(sample.num_shared)}` })
        : null;
      return h(
        "li",
        { style: `--depth: ${depth(sample)}` },
        h("a", { href: `#sample-${number}`, class: "name" }, sample.title),
        h("span", { class: "bar" }, shared, ...parts),
        h("span", { class: "note" }, sample.opening),
      );
    };
    const list = h("ol", { class: "tree card" }, ...samples.map(line));
    on(list, {
      click: (event) => {
        // Following the link would change the part of the URL that selects the view.
        const link = (event.target as HTMLElement).closest("a");
        if (!link) return;
        event.preventDefault();
        document.getElementById(link.hash.slice(1))?.scrollIntoView();
      },
    });
    return h(
      "section",
      { "aria-label": "Tree" },
      h("h2", {}, "Tree"),
      list,
      h("p", { class: "note" }, "Grey: the prefix that the sample shares with the sample above it. Green: replies."),
    );
  }

  private legend(): HTMLElement {
    const buttons = PAINTS.map(([paint, label]) =>
      on(h("button", { type: "button", "aria-pressed": String(paint === this.paint), "data-paint": paint }, label), {
        click: () => {
          this.paint = paint;
          buttons.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.paint === paint)));
          this.draw();
        },
      }),
    );
    return h(
      "section",
      { "aria-label": "Colours" },
      h("div", { class: "row" }, h("h2", {}, "Colours"), h("div", { class: "choice", role: "group" }, ...buttons)),
      this.keys,
    );
  }

  private drawKeys(): void {
    const { doc, paint } = this;
    if (paint === "kind") {
      const entry = (kind: string, name: string, count: number, text: string) =>
        h("li", {}, h("span", { class: `t ${kind}` }, name), h("b", {}, count), ` ${text}`);
      fill(
        this.keys,
        h(
          "ul",
          { class: "keys card" },
          ...doc.kinds.map((kind) => entry(kind.name, kind.meaning, kind.count, kind.explanation)),
          entry("fault", "fault", doc.num_faulty, "the turns, the record and the chat template contradict each other"),
        ),
      );
      return;
    }
    if (paint === "version") {
      const entry = (version: number) =>
        h("li", {}, h("span", { class: "t heat", style: this.versionStyle(version) }, `version ${version}`));
      fill(this.keys, h("ul", { class: "keys card" }, ...this.versions.map(entry)));
      return;
    }
    const most = this.largest[paint];
    const at = paint === "advantage" ? [-1, -0.5, 0, 0.5, 1] : [0, -0.25, -0.5, -0.75, -1];
    const entry = (share: number) =>
      h("li", {}, h("span", { class: "t heat", style: heat(share) }, significant(share * most)));
    const unit = paint === "advantage" ? "advantage, as the trainer used it" : "nats, computed by the engine when it sampled the token";
    fill(this.keys, h("ul", { class: "keys scale card" }, ...at.map(entry), h("li", {}, unit)));
  }

  private draw(): void {
    this.pinned = null;
    this.tip.hidden = true;
    this.drawKeys();
    fill(this.body, h("h2", {}, "Tokens"), ...this.doc.samples.map((sample, number) => this.sample(sample, number)));
  }

  private sample(sample: SampleDocument, number: number): HTMLElement {
    const at = sample.num_shared;
    const last = sample.ids.length;
    const cut = (from: number, to: number) =>
      sample.segments
        // A reply may have no tokens.
        .filter(({ start, end }) =>
          start === end ? from <= start && (start < to || to === last) : start < to && end > from,
        )
        .map((each) => ({ ...each, start: Math.max(each.start, from), end: Math.min(each.end, to) }));
    const [shared, own] = [cut(0, at), cut(at, last)];
    const parent = sample.parent === null ? null : this.doc.samples[sample.parent];
    return h(
      "article",
      { class: "sample card", id: `sample-${number}` },
      h("h3", {}, sample.title, " ", h("span", { class: "note" }, sample.opening)),
      parent && shared.length
        ? this.folded(
            `${at} tokens as in ${parent.title}`,
            () => shared.map((segment) => this.segment(sample, number, segment)),
            at <= FEW,
          )
        : null,
      ...own.map((segment) => this.segment(sample, number, segment)),
    );
  }

  /** Return an element that creates its content when it is opened first. */
  private folded(label: string, inside: () => HTMLElement[], isOpen = false): HTMLElement {
    const fold = h("details", { class: "shared", open: isOpen }, h("summary", {}, label));
    const fillOnce = () => {
      if (fold.open && fold.childElementCount === 1) fold.append(...inside());
    };
    fillOnce();
    return on(fold, { toggle: fillOnce });
  }

  private segment(sample: SampleDocument, number: number, segment: Segment): HTMLElement {
    const count = segment.end - segment.start;
    const text = h("div", { class: "text" });
    const add = (from: number) => {
      const to = Math.min(from + MOST, segment.end);
      text.append(...this.spans(sample, number, from, to));
      if (to === segment.end) return;
      const more = h("button", { type: "button", class: "more" }, `${segment.end - to} more tokens`);
      text.append(
        on(more, {
          click: () => {
            more.remove();
            add(to);
          },
        }),
      );
    };
    add(segment.start);
    return h(
      "div",
      { class: segment.is_reply ? "segment reply" : "segment" },
      h("p", {}, h("b", {}, segment.title), ` ${count} tokens${segment.note ? ` · ${segment.note}` : ""}`),
      text,
    );
  }

  private spans(sample: SampleDocument, number: number, from: number, to: number): Node[] {
    const ends = new Set(sample.line_ends);
    const found: Node[] = [];
    for (let at = from; at < to; at++) {
      const classes = ["t", this.paint === "kind" ? this.doc.kinds[sample.kinds[at]].name : "plain"];
      if (sample.faults[at] && this.paint === "kind") classes.push("fault");
      if (sample.parent !== null && at === sample.num_shared) classes.push("differs");
      const style = this.paint === "kind" ? "" : this.styleOf(sample, at);
      if (style) classes.push("heat");
      found.push(
        h(
          "span",
          { class: classes.join(" "), style: style || null, "data-sample": number, "data-at": at },
          sample.texts[at],
        ),
      );
      if (ends.has(at)) found.push(document.createTextNode("\n"));
    }
    return found;
  }

  private styleOf(sample: SampleDocument, at: number): string {
    if (this.paint === "version") {
      const version = sample.versions[at];
      return version === null ? "" : this.versionStyle(version);
    }
    const isAdvantage = this.paint === "advantage";
    const value = isAdvantage ? sample.advantages[at] : sample.logprobs[at];
    return value === null ? "" : heat(value / this.largest[isAdvantage ? "advantage" : "logprob"]);
  }

  private versionStyle(version: number): string {
    const role = VERSION_ROLES[this.versions.indexOf(version) % VERSION_ROLES.length];
    return `background: color-mix(in srgb, var(--${role}) 40%, transparent)`;
  }

  private point(target: HTMLElement | null): void {
    const span = target?.closest<HTMLElement>("[data-at]") ?? this.pinned;
    this.tip.hidden = span === null;
    if (span) this.tip.textContent = this.described(Number(span.dataset.sample), Number(span.dataset.at));
  }

  private pin(target: HTMLElement | null): void {
    const span = target?.closest<HTMLElement>("[data-at]") ?? null;
    this.pinned?.classList.remove("pinned");
    this.pinned = span === this.pinned ? null : span;
    this.pinned?.classList.add("pinned");
    this.point(this.pinned);
  }

  /** Return the known facts about a token as one line. */
  private described(number: number, at: number): string {
    const sample = this.doc.samples[number];
    const [turn, logprob, version, advantage] = [
      sample.turns[at],
      sample.logprobs[at],
      sample.versions[at],
      sample.advantages[at],
    ];
    const parts = [
      `token ${at}`,
      `“${sample.texts[at]}”`,
      `id ${sample.ids[at]}`,
      this.doc.kinds[sample.kinds[at]].meaning,
      turn === null ? null : `turn ${turn}`,
      logprob === null ? null : `logprob ${logprob.toFixed(4)}`,
      version === null ? null : `version ${version}`,
      advantage === null ? null : `advantage ${significant(advantage, 4)}`,
      sample.parent !== null && at === sample.num_shared ? "here the sample departs from the sample above it" : null,
      ...(sample.faults[at] ?? []).map((fault) => `FAULT: ${fault}`),
    ];
    return parts.filter((part) => part !== null).join(" · ");
  }

  private columns(): HTMLElement {
    const head = ["token", "id", "position", "turn", "logprob", "version", "advantage"];
    const make = (sample: SampleDocument) => {
      const rows = sample.ids
        .map((_, at) => at)
        .filter((at) => sample.turns[at] !== null || sample.faults[at])
        .map((at) => this.columnRow(sample, at));
      return h(
        "div",
        { class: "columns" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ...head.map((name) => h("th", { scope: "col" }, name)),
              h("th", { scope: "col", class: "words" }, "kind"),
            ),
          ),
          h("tbody", {}, ...rows),
        ),
      );
    };
    const folds = this.doc.samples.map((sample) => {
      const fold = this.folded(`${sample.title}: sampled tokens and faults`, () => [make(sample)]);
      fold.className = "card";
      return fold;
    });
    return h("section", { "aria-label": "Columns" }, h("h2", {}, "Columns"), ...folds);
  }

  private columnRow(sample: SampleDocument, at: number): HTMLElement {
    const kind = this.doc.kinds[sample.kinds[at]].name;
    const faults = sample.faults[at] ?? [];
    const number = (value: number | null, digits?: number) =>
      value === null ? "" : digits === undefined ? String(value) : value.toFixed(digits);
    const is = faults.length ? " fault" : "";
    return h(
      "tr",
      { class: is.trim() || null },
      h("th", { scope: "row" }, h("span", { class: `t ${kind}${is}` }, sample.texts[at])),
      h("td", {}, sample.ids[at]),
      h("td", {}, at),
      h("td", {}, number(sample.turns[at])),
      h("td", {}, number(sample.logprobs[at], 4)),
      h("td", {}, number(sample.versions[at])),
      h("td", {}, number(sample.advantages[at], 4)),
      h("td", { class: "words" }, [kind, ...faults].join("; ")),
    );
  }
}

/** Return the style of a value. share: the value divided by the largest absolute value. */
function heat(share: number): string {
  const role = share < 0 ? "orange" : "blue";
  return `background: color-mix(in srgb, var(--${role}) ${Math.round(8 + 62 * Math.abs(share))}%, transparent)`;
}
