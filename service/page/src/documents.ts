// The documents that the page shows; service/report/document.py and service/inspect/view.py write them.

export type Column = (number | null)[];
export type Columns = Record<string, Column>;

export interface Table {
  caption: string;
  header: string[];
  rows: string[][];
  total: string[] | null;
  note: string;
  is_text: boolean;
}

export interface Live {
  phase: string;
  phase_detail: string;
  started_at: number;
  checkpoint_step: number;
  tables: Table[];
  notices: string[];
}

export interface RunDocument {
  kind: "run";
  name: string;
  term: number;
  after: number;
  finished_at: number | null;
  verdict: string;
  ending: string;
  is_scaled: boolean;
  policy_age_bound: number | null;
  outcomes: Record<string, number>;
  stage_seconds: Record<string, number>;
  tiles: { label: string; value: string; detail: string }[];
  checks: { name: string; is_kept: boolean; text: string }[];
  tables: Table[];
  loss_tables: Table[];
  loss_definitions: [string, string][];
  definitions: [string, string][];
  statistics: Record<string, { group: string; unit: string; help: string }>;
  steps: Columns;
  evaluations: { step: number[]; policy_version: number[]; num_tasks: number[]; reward: Column };
  config_text: string;
  live: Live | null;
}

export interface Segment {
  title: string;
  note: string;
  is_reply: boolean;
  start: number;
  end: number;
}

export interface SampleDocument {
  title: string;
  opening: string;
  parent: number | null;
  num_shared: number;
  segments: Segment[];
  ids: number[];
  texts: string[];
  /** For each token, an index of `kinds`. */
  kinds: number[];
  turns: Column;
  logprobs: Column;
  versions: Column;
  advantages: Column;
  /** Positions of the tokens that end a line. */
  line_ends: number[];
  faults: Record<string, string[]>;
}

export interface TrajectoryDocument {
  kind: "trajectory";
  id: string;
  step: number;
  group: string;
  task: string;
  environment: string;
  facts: [string, string][];
  kinds: { name: string; meaning: string; explanation: string; count: number }[];
  fault_counts: [string, number][];
  num_faulty: number;
  note: string;
  samples: SampleDocument[];
}

export type PageDocument = RunDocument | TrajectoryDocument;
