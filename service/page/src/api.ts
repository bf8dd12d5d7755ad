// Requests to the run's API. The API key is kept until the tab is closed.

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

/** GET a path below /api/v1, without the empty parameters. Throws Refused, or TypeError without a network. */
export async function ask<Answer>(
  path: string,
  parameters: Record<string, string | number | null> = {},
  signal?: AbortSignal,
): Promise<Answer> {
  // A proxy may serve the run below a path prefix.
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
