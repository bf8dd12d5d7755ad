// Charts over training steps, drawn by uPlot. All share the x axis: pointing at a step shows its values in every legend.

import uPlot from "uplot";
import { Child, duration, fill, h, on, percent, shortCount, significant } from "./dom";
import type { Column } from "./documents";

export type Scale = "number" | "whole" | "log" | "share" | "seconds";
export type Mark = "line" | "faint" | "dash" | "dot" | "area";

export interface Curve {
  label: string;
  role: string;
  values: Column;
  mark?: Mark;
  width?: number;
  /** The legend's text while the pointer is elsewhere. */
  idleText?: string;
  /** The value is the same at every step and is in the label; the legend does not repeat it. */
  isBound?: boolean;
}

export interface Chart {
  key: string;
  title: string;
  note: string;
  /** Text instead of a chart without values. */
  missing?: string;
  steps: number[];
  curves: Curve[];
  scale: Scale;
  isStacked?: boolean;
  /** A value that is always within the range of the vertical axis. */
  base?: number;
  size: "lead" | "half" | "small";
}

const HEIGHTS = { lead: [330, 250], half: [230, 210], small: [150, 150] };
const NARROW = 560;
const ZERO_GAP = 1;
const sync = uPlot.sync("steps");

const isKnown = (value: number | null | undefined): value is number =>
  value !== null && value !== undefined && Number.isFinite(value);

export const known = (values: Column): number[] => values.filter(isKnown);

function tone(role: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();
}

export function shown(value: number, scale: Scale): string {
  if (scale === "share") return percent(value);
  if (scale === "seconds") return duration(value);
  return Math.abs(value) >= 1000 ? shortCount(value) : significant(value);
}

/** Return a chart's content as text, for screen readers. */
export function described(chart: Chart): string {
  const kind = chart.isStacked ? "Stacked chart" : "Line chart";
  const parts = chart.curves
    .filter((curve) => !curve.isBound)
    .map((curve) => {
      const values = known(curve.values);
      if (curve.idleText) return `${curve.label} ${curve.idleText}`;
      if (!values.length) return `${curve.label} not measured`;
      const [first, last] = [values[0], values[values.length - 1]];
      const most = values.reduce((a, b) => Math.max(a, b));
      return (
        `${curve.label} from ${shown(first, chart.scale)} to ${shown(last, chart.scale)}, ` +
        `at most ${shown(most, chart.scale)}`
      );
    });
  return `${kind}; ${parts.join("; ")}.`;
}

/** A chart on the page; `update` gives it new values. */
export class Figure {
  readonly element: HTMLElement;
  private readonly legend = h("ul", { class: "legend" });
  private readonly drawing = h("div", { class: "drawing" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private plot: uPlot | null = null;
  private shape = "";
  private values: HTMLElement[] = [];
  private readonly watcher = new ResizeObserver(() => this.resize());

  constructor(private chart: Chart) {
    const caption = h(
      "figcaption",
      {},
      h("h3", {}, chart.title),
      " ",
      h("span", { class: "note" }, chart.note),
      this.legend,
    );
    this.element = h(
      "figure",
      { class: chart.size === "lead" ? "card lead" : "card", id: chart.key },
      caption,
      this.drawing,
    );
    this.update(chart);
  }

  update(chart: Chart): void {
    this.chart = chart;
    const drawn = chart.curves.filter((curve) => known(curve.values).length > 0);
    const isEmpty = chart.steps.length === 0 || drawn.every((curve) => curve.isBound);
    if (isEmpty) {
      this.clear();
      fill(this.drawing, h("p", { class: "missing" }, chart.missing ?? "not measured"));
      return;
    }
    const shape = JSON.stringify(chart.curves.map((curve) => [curve.label, curve.mark]));
    this.drawing.setAttribute("role", "img");
    this.drawing.setAttribute("aria-label", described(chart));
    if (this.plot && shape === this.shape) {
      this.plot.setData(this.data());
    } else {
      this.clear();
      this.shape = shape;
      this.makeLegend();
      fill(this.drawing, this.tip);
      this.plot = new uPlot(this.options(), this.data(), this.drawing);
      this.makeReachable(this.plot);
      figures.add(this);
      this.watcher.observe(this.drawing);
    }
    this.showValues(null);
  }

  redraw(): void {
    this.plot?.redraw(false, true);
  }

  resize(): void {
    const width = this.drawing.clientWidth;
    if (!this.plot || width === 0) return;
    const height = this.height(width);
    if (width !== this.plot.width || height !== this.plot.height) this.plot.setSize({ width, height });
  }

  /** Remove the chart from the page. */
  clear(): void {
    this.watcher.disconnect();
    figures.delete(this);
    this.plot?.destroy();
    this.plot = null;
    this.shape = "";
    fill(this.legend);
    fill(this.drawing);
  }

  private height(width: number): number {
    const [wide, narrow] = HEIGHTS[this.chart.size];
    return width < NARROW && this.chart.size === "lead" ? narrow : wide;
  }

  private makeLegend(): void {
    this.values = [];
    const isNamed = this.chart.size !== "small" || this.chart.curves.length > 1;
    const entries = this.chart.curves.map((curve) => {
      const value = h("span", { class: "value" });
      this.values.push(value);
      const mark = this.chart.isStacked ? "area" : (curve.mark ?? "line");
      const swatch = h("span", { class: `swatch ${mark}`, style: `--tone: var(--${curve.role})` });
      return h("li", {}, isNamed ? swatch : null, isNamed ? curve.label : null, value);
    });
    fill(this.legend, ...entries);
    this.legend.classList.toggle("bare", !isNamed);
  }

  /** Show the values of a step in the legend. index: the step's index in the chart, or null. */
  private showValues(index: number | null): void {
    this.chart.curves.forEach((curve, number) => {
      const value = index === null ? null : curve.values[index];
      const rest = curve.isBound ? "" : (curve.idleText ?? "");
      const text = curve.isBound || !isKnown(value) ? rest : shown(value, this.chart.scale);
      this.values[number].textContent = text;
    });
  }

  private data(): uPlot.AlignedData {
    const { steps, curves, scale, isStacked } = this.chart;
    if (isStacked) {
      // A curve is stacked on the curves after it in the list; the first is drawn below all others.
      const sums = steps.map(() => 0);
      const tops = curves.map((curve) =>
        curve.values.map((value, at) => (sums[at] += value ?? 0)),
      );
      return [steps, ...tops.reverse()];
    }
    const rows = curves.map((curve) => (scale === "log" ? this.logarithms(curve.values) : curve.values));
    return [steps, ...rows];
  }

  /** Zero has no logarithm: draw it a decade below the smallest other value. */
  private logarithms(values: Column): Column {
    const floor = this.floor();
    return values.map((value) => {
      if (!isKnown(value)) return null;
      return value > 0 ? Math.log10(value) : floor;
    });
  }

  private floor(): number {
    const positive = this.chart.curves.flatMap((curve) => known(curve.values)).filter((v) => v > 0);
    return positive.length ? Math.floor(Math.log10(Math.min(...positive))) - ZERO_GAP : -12;
  }

  private options(): uPlot.Options {
    const { size, isStacked, curves } = this.chart;
    const font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
    const drawn = isStacked ? [...curves].reverse() : curves;
    const width = Math.max(this.drawing.clientWidth, 200);
    return {
      width,
      height: this.height(width),
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: sync.key, scales: ["x", null] },
        drag: { x: true, y: false },
        points: { size: 7, show: !isStacked },
        focus: { prox: -1 },
      },
      scales: {
        x: { time: false, range: (_, low, high) => [low - 0.5, high + 0.5] },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        {
          stroke: () => tone("muted"),
          grid: { show: false },
          ticks: { stroke: () => tone("grid"), size: 4 },
          font,
          size: size === "small" ? 26 : 28,
          space: 56,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6],
          values: (_, ticks) => ticks.map(shortCount),
        },
        {
          stroke: () => tone("muted"),
          grid: { stroke: () => tone("grid"), width: 1 },
          ticks: { show: false },
          font,
          gap: 6,
          space: size === "small" ? 34 : 42,
          size: (_, labels) => 14 + 6.4 * Math.max(3, ...(labels ?? []).map((label) => label.length)),
          ...this.ticks(),
        },
      ],
      series: [{}, ...drawn.map((curve) => this.series(curve))],
      hooks: { setCursor: [(plot) => this.point(plot)] },
    };
  }

  private ticks(): Partial<uPlot.Axis> {
    const { scale } = this.chart;
    if (scale === "log") {
      const floor = this.floor();
      const hasZero = this.chart.curves.some((curve) => known(curve.values).some((v) => v <= 0));
      const label = (value: number) =>
        hasZero && value === floor ? "0" : `1e${value}`.replace("-", "−");
      return {
        splits: (_plot, _axis, low, high) => {
          const first = hasZero ? floor : Math.ceil(low);
          const stride = Math.max(1, Math.ceil((Math.floor(high) - first) / 5));
          const found = [];
          for (let at = first; at <= high; at += stride) found.push(at);
          return found;
        },
        values: (_, ticks) => ticks.map(label),
      };
    }
    if (scale === "whole") return { incrs: [1, 2, 5, 10, 20, 50, 100, 1000], values: (_, ticks) => ticks.map(String) };
    if (scale === "share") return { values: (_, ticks) => ticks.map((v) => `${Math.round(100 * v)} %`) };
    return { values: (_, ticks) => ticks.map((v) => shown(v, "number")) };
  }

  private range(low: number, high: number): [number, number] {
    const { scale, isStacked, base } = this.chart;
    if (scale === "share") return [0, 1];
    if (!isKnown(low) || !isKnown(high)) return [0, 1];
    if (isStacked) return [0, high > 0 ? high * 1.04 : 1];
    if (scale === "whole") return [Math.min(-0.08, low), Math.max(1, high) * 1.15];
    if (scale === "log") return [Math.floor(low) - 0.1, Math.max(Math.ceil(high), Math.floor(low) + 1) + 0.1];
    if (base !== undefined) [low, high] = [Math.min(low, base), Math.max(high, base)];
    const margin = 0.1 * (high - low) || Math.abs(high) * 0.1 || 0.5;
    return [low === base ? low : low - margin, high + margin];
  }

  private series(curve: Curve): uPlot.Series {
    const count = known(curve.values).length;
    const stroke = () => tone(curve.role);
    if (this.chart.isStacked) {
      return { fill: stroke, width: 0, paths: stairs, points: { show: false } };
    }
    const isDots = curve.mark === "dot";
    return {
      stroke,
      width: curve.width ?? (this.chart.size === "small" ? 1.5 : 1.8),
      alpha: curve.mark === "faint" ? 0.4 : 1,
      dash: curve.mark === "dash" ? [5, 3] : undefined,
      spanGaps: true,
      points: { show: isDots || count === 1, size: isDots ? 7 : 6, fill: stroke, width: 0 },
    };
  }

  private point(plot: uPlot): void {
    const index = plot.cursor.idx ?? null;
    this.showValues(index);
    const isHere = plot.over.matches(":hover, :focus");
    this.tip.hidden = index === null || !isHere;
    if (index === null || !isHere) return;
    const rows: Child[] = this.chart.curves
      .filter((curve) => !curve.isBound && isKnown(curve.values[index]))
      .map((curve) =>
        h(
          "div",
          {},
          h("span", { class: "swatch area", style: `--tone: var(--${curve.role})` }),
          `${curve.label} `,
          h("b", {}, shown(curve.values[index] as number, this.chart.scale)),
        ),
      );
    fill(this.tip, h("div", { class: "at" }, `step ${this.chart.steps[index]}`), ...rows);
    const left = plot.over.offsetLeft + (plot.cursor.left ?? 0);
    const isRight = left > this.drawing.clientWidth / 2;
    this.tip.style.left = isRight ? "auto" : `${left + 14}px`;
    this.tip.style.right = isRight ? `${this.drawing.clientWidth - left + 14}px` : "auto";
  }

  /** Let the pointer and the arrow keys select a step. */
  private makeReachable(plot: uPlot): void {
    plot.over.tabIndex = 0;
    const move = (by: number) => {
      const last = this.chart.steps.length - 1;
      const index = Math.min(Math.max((plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by, 0), last);
      plot.setCursor({ left: plot.valToPos(this.chart.steps[index], "x"), top: 10 }, true);
    };
    on(plot.over, {
      keydown: (event) => {
        if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
        event.preventDefault();
        move(event.key === "ArrowRight" ? 1 : -1);
      },
      blur: () => plot.setCursor({ left: -10, top: -10 }, true),
    });
  }
}

/** Draw a bar for each step, without gaps between the bars. */
const stairs: uPlot.Series.PathBuilder = (plot, number, first, last) => {
  const [steps, tops] = [plot.data[0], plot.data[number]];
  const path = new Path2D();
  const floor = plot.valToPos(0, "y", true);
  const edge = (at: number) => {
    if (at === 0) return steps[0] - 0.5;
    if (at === steps.length) return steps[at - 1] + 0.5;
    return (steps[at - 1] + steps[at]) / 2;
  };
  const x = (at: number) => Math.round(plot.valToPos(edge(at), "x", true));
  path.moveTo(x(first), floor);
  for (let at = first; at <= last; at++) {
    const top = plot.valToPos(tops[at] ?? 0, "y", true);
    path.lineTo(x(at), top);
    path.lineTo(x(at + 1), top);
  }
  path.lineTo(x(last + 1), floor);
  path.closePath();
  return { fill: path, flags: 1 };
};

const figures = new Set<Figure>();

/** Redraw when the colour scheme changes, and in the light scheme for printing. */
export function followTheme(): void {
  const redraw = () => figures.forEach((figure) => figure.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const printed = (isPrinted: boolean) => {
    document.documentElement.classList.toggle("printed", isPrinted);
    redraw();
  };
  addEventListener("beforeprint", () => printed(true));
  addEventListener("afterprint", () => printed(false));
}
