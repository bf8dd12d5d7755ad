// The view of a live or finished run: its verdict, charts, tables and configuration.

import { Chart, Curve, Figure, known, shown } from "./charts";
import { Child, duration, fill, h, moment, percent } from "./dom";
import type { Column, RunDocument, Table } from "./documents";
import specs from "./figures.json";

const AVERAGED_STEPS = 5;

interface CurveSpec {
  label: string;
  role: string;
  read: string;
  idle_at?: number;
  dashes?: boolean;
}

interface FigureSpec {
  key: string;
  title: string;
  note: string;
  scale?: string;
  base?: number;
  missing?: string;
  curves: CurveSpec[];
}

interface BandSpec {
  label: string;
  role: string;
  parts: string[];
}

/** Return the mean of each value and the `width` - 1 values before it, without the unknown ones. */
export function trailingMean(values: Column, width: number): Column {
  return values.map((_, at) => {
    const found = known(values.slice(Math.max(0, at - width + 1), at + 1));
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
  });
}

function column(doc: RunDocument, name: string): Column {
  return doc.steps[name] ?? stepsOf(doc).map(() => null);
}

const stepsOf = (doc: RunDocument): number[] => (doc.steps.step ?? []) as number[];

function rewardChart(doc: RunDocument): Chart {
  const steps = stepsOf(doc);
  const { evaluations } = doc;
  const all = [...new Set([...steps, ...evaluations.step])].sort((a, b) => a - b);
  const at = new Map(all.map((step, index) => [step, index]));
  const spread = (of: number[], values: Column): Column => {
    const found: Column = all.map(() => null);
    of.forEach((step, index) => (found[at.get(step) as number] = values[index] ?? null));
    return found;
  };
  const rewards = column(doc, "reward");
  const last = (values: Column) => {
    const found = known(values);
    return found.length ? found[found.length - 1].toFixed(2) : "";
  };
  const mean = trailingMean(rewards, AVERAGED_STEPS);
  const curves: Curve[] = [
    { label: "training, each step", role: "blue", mark: "faint", width: 1, values: spread(steps, rewards) },
    { label: `mean of ${AVERAGED_STEPS} steps`, role: "blue", width: 2.4, values: spread(steps, mean), idleText: last(mean) },
  ];
  if (known(evaluations.reward).length) {
    curves.push({
      label: "evaluation, held out",
      role: "orange",
      mark: "dot",
      width: 1,
      values: spread(evaluations.step, evaluations.reward),
      idleText: last(evaluations.reward),
    });
  }
  if (doc.is_scaled) {
    const ones = all.map(() => 1);
    curves.push({ label: "best possible play", role: "green", mark: "dash", width: 1.2, values: ones, isBound: true });
  }
  return {
    key: "reward",
    title: doc.is_scaled ? "Reward" : "Reward (plain return)",
    note: doc.is_scaled ? "1 is the best possible play." : "",
    missing: "No trajectory was graded.",
    steps: all,
    curves,
    scale: "number",
    base: doc.is_scaled ? 0 : undefined,
    size: "lead",
  };
}

function bandValues(doc: RunDocument, prefix: string, parts: string[]): Column {
  const columns = parts.map((part) => column(doc, `${prefix}.${part}`));
  return stepsOf(doc).map((_, at) => columns.reduce((sum, values) => sum + (values[at] ?? 0), 0));
}

function stackedCharts(doc: RunDocument): Chart[] {
  const steps = stepsOf(doc);
  const bands = (list: BandSpec[], prefix: string) =>
    list
      .map((band) => ({ ...band, values: bandValues(doc, prefix, band.parts) }))
      .filter((band) => band.values.some((value) => (value ?? 0) > 0));
  const inAll = (of: Record<string, number>, parts: string[]) =>
    parts.reduce((sum, part) => sum + (of[part] ?? 0), 0);
  const ended = bands(specs.outcomes, "outcomes");
  const totals = steps.map((_, at) => ended.reduce((sum, band) => sum + (band.values[at] ?? 0), 0));
  const all = Object.values(doc.outcomes).reduce((a, b) => a + b, 0) || 1;
  const outcomes: Chart = {
    key: "outcomes",
    title: "Outcomes",
    note: "Shares of each step's trajectories.",
    missing: "No trajectory ended.",
    steps,
    curves: ended.map(({ label, role, parts, values }) => ({
      label,
      role,
      values: values.map((value, at) => (totals[at] ? (value ?? 0) / totals[at] : 0)),
      idleText: percent(inAll(doc.outcomes, parts) / all),
    })),
    scale: "share",
    isStacked: true,
    size: "half",
  };
  const stages: Chart = {
    key: "stages",
    title: "Stage times",
    note: "Seconds of a step, by stage.",
    missing: "No stage was timed.",
    steps,
    curves: bands(specs.stages, "stages").map(({ label, role, parts, values }) => ({
      label,
      role,
      values,
      idleText: duration(inAll(doc.stage_seconds, parts)),
    })),
    scale: "seconds",
    isStacked: true,
    size: "half",
  };
  return [outcomes, stages];
}

function lineChart(doc: RunDocument, spec: FigureSpec, size: "half" | "small"): Chart {
  const curves: Curve[] = spec.curves
    .map((curve) => ({ ...curve, values: column(doc, curve.read) }))
    .filter(({ values, idle_at }) => {
      const found = known(values);
      return found.length > 0 && !(idle_at !== undefined && found.every((value) => value === idle_at));
    })
    .map(({ label, role, dashes, values }) => {
      const mark = dashes ? ("dash" as const) : undefined;
      const found = known(values);
      return { label, role, values, mark, idleText: size === "small" ? shown(found[found.length - 1], "number") : undefined };
    });
  if (spec.key === "age" && doc.policy_age_bound !== null && curves.length) {
    const bound = doc.policy_age_bound;
    const values = stepsOf(doc).map(() => bound);
    curves.push({ label: `bound ${bound}`, role: "red", mark: "dash", width: 1.2, values, isBound: true });
  }
  return {
    key: spec.key,
    title: spec.title,
    note: spec.note,
    missing: spec.missing,
    steps: stepsOf(doc),
    curves,
    scale: (spec.scale as Chart["scale"]) ?? "number",
    base: spec.base,
    size,
  };
}

export function tableElement(table: Table): HTMLElement {
  const row = (cells: string[], tag: "td" | "th") =>
    h("tr", {}, ...cells.map((cell, at) => (at === 0 ? h("th", { scope: "row" }, cell) : h(tag, {}, cell))));
  return h(
    "div",
    { class: table.is_text ? "table card prose" : "table card" },
    h(
      "table",
      {},
      h("caption", {}, table.caption),
      h("thead", {}, h("tr", {}, ...table.header.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, ...table.rows.map((cells) => row(cells, "td"))),
      table.total ? h("tfoot", {}, row(table.total, "td")) : null,
    ),
    table.note ? h("p", { class: "note" }, table.note) : null,
  );
}

function definitions(list: [string, string][]): HTMLElement {
  return h(
    "dl",
    { class: "definitions" },
    ...list.flatMap(([name, text]): Child[] => [h("dt", {}, name), h("dd", {}, text)]),
  );
}

/** A run on the page. `update` shows a newer document, and keeps the charts that are drawn already. */
export class RunView {
  private readonly header = h("header");
  private readonly keys = h("section", { "aria-label": "Key figures" });
  private readonly now = h("section", { "aria-label": "Now" });
  private readonly plots = h("div", { class: "plots" });
  private readonly small = h("div", { class: "small" });
  private readonly lossFigures = h("div", { class: "small" });
  private readonly lossTables = h("div");
  private readonly fold = h(
    "details",
    { class: "fold", id: "loss-statistics" },
    h("summary", { class: "card" }, "Statistics of the loss"),
    h(
      "p",
      { class: "note" },
      "Computed over the trained tokens of each step, with equal weights, and over its returns. Only " +
        "statistics that this loss uses are shown. First and last: the first and last step with a value.",
    ),
    this.lossFigures,
    this.lossTables,
  );
  private readonly none = h(
    "p",
    { class: "missing" },
    "The charts begin with the first training step.",
  );
  private readonly tables = h("div", { class: "tables" });
  private readonly reference = h("section", { "aria-label": "Reference" });
  private readonly figures = new Map<string, Figure>();

  constructor(private readonly root: HTMLElement) {
    fill(
      root,
      this.header,
      this.keys,
      this.now,
      h(
        "section",
        { "aria-label": "Figures" },
        h("h2", {}, "Progress"),
        this.none,
        this.plots,
        this.small,
        this.fold,
      ),
      h("section", { "aria-label": "Tables" }, h("h2", {}, "Tables"), this.tables),
      this.reference,
    );
  }

  update(doc: RunDocument): void {
    document.title = `${doc.name}: ${doc.verdict}`;
    this.updateHeader(doc);
    this.updateNow(doc);
    const hasSteps = stepsOf(doc).length > 0;
    this.none.hidden = hasSteps;
    this.plots.hidden = this.small.hidden = !hasSteps;
    this.fold.hidden = !hasSteps || doc.loss_tables.length === 0;
    if (hasSteps) this.updateFigures(doc);
    fill(this.tables, ...doc.tables.map(tableElement));
    if (!this.reference.childElementCount || doc.after === 0) this.updateReference(doc);
  }

  close(): void {
    this.figures.forEach((figure) => figure.clear());
    this.figures.clear();
    fill(this.root);
  }

  private updateHeader(doc: RunDocument): void {
    const what = doc.live ? "Rayloom run" : "Rayloom run report";
    const when = doc.finished_at === null ? [] : [moment(doc.finished_at)];
    fill(
      this.header,
      h("p", { class: "eyebrow" }, [what, doc.name, ...when].join(" · ")),
      h("h1", {}, doc.verdict),
      doc.ending ? h("p", { class: "ended" }, doc.ending) : null,
    );
    fill(
      this.keys,
      h(
        "dl",
        { class: "tiles card" },
        ...doc.tiles.map(({ label, value, detail }) =>
          h("div", {}, h("dt", {}, label), h("dd", { class: "value" }, value), h("dd", { class: "detail" }, detail)),
        ),
      ),
      h(
        "ul",
        { class: "checks", "aria-label": "Checks" },
        ...doc.checks.map(({ name, is_kept, text }) =>
          is_kept
            ? h("li", {}, h("span", { class: "mark" }, "✓"), name)
            : h("li", { class: "broken" }, h("span", { class: "mark", "aria-label": "broken" }, "✗"), text),
        ),
      ),
    );
  }

  private updateNow(doc: RunDocument): void {
    const live = doc.live;
    this.now.hidden = live === null;
    if (live === null) return;
    const detail = live.phase_detail ? `: ${live.phase_detail}` : "";
    const notices = live.notices.slice(-20).reverse();
    fill(
      this.now,
      h("h2", {}, "Now"),
      h(
        "p",
        { class: "phase" },
        h("span", { class: "pill" }, live.phase),
        `${detail ? `${detail.slice(2)}, ` : ""}checkpoint of step ${live.checkpoint_step}, ` +
          `started ${moment(live.started_at)}`,
      ),
      h("div", { class: "tables three" }, ...live.tables.map(tableElement)),
      notices.length
        ? h(
            "details",
            { class: "card", open: true },
            h("summary", {}, "Notices"),
            h("ul", { class: "notices" }, ...notices.map((text) => h("li", {}, text))),
          )
        : null,
    );
  }

  private updateFigures(doc: RunDocument): void {
    const large = (specs.large as FigureSpec[]).map((spec) => lineChart(doc, spec, "half"));
    this.show(this.plots, [rewardChart(doc), ...stackedCharts(doc), ...large]);
    this.show(this.small, (specs.small as FigureSpec[]).map((spec) => lineChart(doc, spec, "small")));
    const loss = (specs.loss as FigureSpec[])
      .map((spec) => lineChart(doc, { ...spec, key: `statistic-${spec.key}` }, "small"))
      .filter((chart) => chart.curves.some((curve) => known(curve.values).length > 1));
    this.show(this.lossFigures, loss);
    fill(
      this.lossTables,
      h("div", { class: "tables" }, ...doc.loss_tables.map(tableElement)),
      definitions(doc.loss_definitions),
    );
  }

  /** Show these charts: update those that are shown already, add new ones, and remove the others. */
  private show(place: HTMLElement, charts: Chart[]): void {
    const elements = charts.map((chart) => {
      const found = this.figures.get(chart.key);
      if (found) {
        found.update(chart);
        return found.element;
      }
      const figure = new Figure(chart);
      this.figures.set(chart.key, figure);
      return figure.element;
    });
    elements.forEach((element, at) => {
      if (place.children[at] !== element) place.insertBefore(element, place.children[at] ?? null);
    });
    while (place.children.length > elements.length) {
      const left = place.lastElementChild as HTMLElement;
      this.figures.get(left.id)?.clear();
      this.figures.delete(left.id);
      left.remove();
    }
  }

  private updateReference(doc: RunDocument): void {
    fill(
      this.reference,
      h("h2", {}, "Definitions and configuration"),
      h("details", { class: "card", open: !doc.live }, h("summary", {}, "What each number means"), definitions(doc.definitions)),
      h("details", { class: "card" }, h("summary", {}, "Effective configuration"), h("pre", {}, doc.config_text)),
    );
  }
}

/** Return the newer document of a live run, with the steps that the page already has before its own. */
export function joined(before: RunDocument | null, next: RunDocument): RunDocument {
  if (before === null || before.term !== next.term || next.after === 0) return next;
  const old = before.steps.step?.length ?? 0;
  const added = next.steps.step?.length ?? 0;
  const names = new Set([...Object.keys(before.steps), ...Object.keys(next.steps)]);
  const nulls = (count: number): Column => Array.from({ length: count }, () => null);
  const steps = Object.fromEntries(
    [...names].map((name) => [
      name,
      [...(before.steps[name] ?? nulls(old)), ...(next.steps[name] ?? nulls(added))],
    ]),
  );
  return { ...next, steps };
}

