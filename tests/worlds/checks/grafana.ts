// The type of a dashboard's JSON, made of Grafana's own types, with the options of panels.
import type { AnnotationQuery, Dashboard as Whole, DataQuery, Panel, RowPanel } from "@grafana/schema";
import type * as Heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as TimeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the values of enums, not the enums.
type Plain<T> = T extends string ? `${T}`
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> }
  : T;
// JSON may leave out options, for which the panel has defaults.
type Part<T> = T extends (infer U)[] ? Part<U>[] : T extends object ? { [K in keyof T]?: Part<T[K]> } : T;

interface Of<Type extends string, Options, Custom>
  extends Omit<Plain<Panel>, "type" | "options" | "fieldConfig"> {
  type: Type;
  options: Part<Plain<Options>>;
  fieldConfig: Omit<NonNullable<Plain<Panel>["fieldConfig"]>, "defaults"> & {
    defaults: Omit<NonNullable<Plain<Panel>["fieldConfig"]>["defaults"], "custom"> & { custom?: Part<Plain<Custom>> };
  };
}
type AnyPanel =
  | Of<"timeseries", TimeSeries.Options, TimeSeries.FieldConfig>
  | Of<"stat", Stat.Options, Record<string, never>>
  | Of<"heatmap", Heatmap.Options, Heatmap.FieldConfig>
  | (Omit<Plain<RowPanel>, "type"> & { type: "row" });

// Fields of the Prometheus data source, which Grafana's schema does not contain.
type Query = DataQuery & { expr: string; interval: string };
type Alerts = Plain<AnnotationQuery<Query>> & { titleFormat: string; tagKeys: string };

export type Dashboard = Omit<Plain<Whole>, "panels" | "annotations"> & {
  panels: AnyPanel[];
  annotations: { list: Alerts[] };
};
