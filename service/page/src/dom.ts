// Create elements, and format numbers as service/units.py does.

export type Child = Node | string | number | null | undefined | false;
type Handlers = { [K in keyof HTMLElementEventMap]?: (event: HTMLElementEventMap[K]) => void };

/** Return a new element. Attributes that are null or false are omitted; text is never read as markup. */
export function h<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes: Record<string, string | number | boolean | null | undefined> = {},
  ...children: Child[]
): HTMLElementTagNameMap[Tag] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    // The page's security policy forbids style attributes in markup, but allows this.
    if (name === "style") element.style.cssText = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element: Element, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
}

export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  append(element, children);
}

export function on<Element extends HTMLElement>(element: Element, handlers: Handlers): Element {
  for (const [name, handler] of Object.entries(handlers)) {
    element.addEventListener(name, handler as EventListener);
  }
  return element;
}

export const UNKNOWN = "–";

export function significant(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (size < 1e-4 || size >= 1e6) {
    text = value.toExponential(Math.min(digits, 2) - 1).replace(".0e", "e").replace("e+", "e");
  } else {
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    text = value.toFixed(decimals);
    if (text.includes(".")) text = text.replace(/\.?0+$/, "");
  }
  return text.replace(/^-/, "−");
}

export function shortCount(value: number): string {
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= limit * 0.9995) return significant(value / limit) + letter;
  }
  return significant(value);
}

export const percent = (share: number): string =>
  share > 0 && share < 0.001 ? "< 0.1 %" : `${significant(100 * share, share < 0.995 ? 2 : 3)} %`;

export function duration(seconds: number): string {
  if (seconds < 9.95) return `${significant(Math.max(seconds, 0), 2)} s`;
  const whole = Math.round(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

export function moment(seconds: number | null): string {
  if (seconds === null) return UNKNOWN;
  return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

export const words = (name: string): string => name.replaceAll("_", " ");
