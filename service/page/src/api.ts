// The run's own API: asked with the key that is kept for as long as the tab is open.

const KEY = "rayloom-key";

export class Refused extends Error {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

export const hasKey = (): boolean => sessionStorage.getItem(KEY) !== null;

export function keepKey(key: string | null): void {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

/** path: below /api/v1. Empty parameters are left out. Throws Refused; TypeError without a network. */
export async function ask<Answer>(
  path: string,
  parameters: Record<string, string | number | null> = {},
  signal?: AbortSignal,
): Promise<Answer> {
  // The run may be served below a prefix of its own.
  const base = location.pathname.endsWith("/") ? location.pathname : `${location.pathname}/`;
  const url = new URL(`${base}api/v1/${path}`, location.origin);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== "") url.searchParams.set(name, String(value));
  }
  const key = sessionStorage.getItem(KEY);
  const headers: Record<string, string> = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(url, { headers, signal, cache: "no-store" });
  if (answer.ok) return (await answer.json()) as Answer;
  const problem = (await answer.json().catch(() => null)) as { detail?: unknown } | null;
  const detail = typeof problem?.detail === "string" ? problem.detail : answer.statusText;
  throw new Refused(answer.status, detail);
}
