// Draw window.BOARD, a dashboard's panels with Prometheus' answers, as Grafana draws them.
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  FieldType, ThemeContext, VizOrientation, applyFieldOverrides, createTheme, dateTime, getDisplayProcessor,
  getDisplayValueAlignmentFactors, getFieldDisplayValues, toDataFrame,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';

const COLUMN = 1600 / 24, ROW = 38, GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });
const { now, shown_s, panels } = window.BOARD;
const [from, to] = [now - shown_s, now].map((second) => dateTime(second * 1000));
const timeRange = { from, to, raw: { from, to } };
const unchanged = (text) => text;

function named(legend, labels) {
  return legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
}

function framesOf({ panel, data }) {
  const { defaults = {} } = panel.fieldConfig ?? {};
  const isStat = panel.type === 'stat';
  const lines = {
    drawStyle: 'line', lineWidth: 1, pointSize: 5, axisPlacement: 'auto', showPoints: 'auto', ...defaults.custom,
  };
  const frames = data.flatMap(({ legend, result }) => result.map(({ metric, value, values = [value] }) => {
    const displayNameFromDS = named(legend, metric);
    const color = isStat && defaults.color ? defaults.color : { mode: 'palette-classic' };
    const config = { ...defaults, displayNameFromDS, color, custom: isStat ? {} : lines };
    const fields = [
      { name: 'Time', type: FieldType.time, values: values.map(([second]) => second * 1000), config: {} },
      { name: 'Value', type: FieldType.number, values: values.map(([, text]) => parseFloat(text)), labels: metric, config },
    ];
    return toDataFrame({ name: displayNameFromDS, fields });
  }));
  const given = { data: frames, fieldConfig: { defaults: {}, overrides: [] }, replaceVariables: unchanged, theme, timeZone: 'utc' };
  return applyFieldOverrides(given).map((frame) => {
    frame.fields[0].config.custom = { axisPlacement: 'auto' };
    for (const field of frame.fields) field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    return frame;
  });
}

function Numbers({ frames, panel, width, height }) {
  const { reduceOptions, colorMode, graphMode, textMode, justifyMode, orientation } = panel.options;
  const getValues = () => getFieldDisplayValues({
    fieldConfig: panel.fieldConfig, reduceOptions, replaceVariables: unchanged, theme, data: frames, timeZone: 'utc',
  });
  const look = { theme, colorMode, graphMode, textMode, justifyMode };
  const renderValue = ({ value, count, width, height, alignmentFactors }) => (
    <BigValue {...look} {...{ count, width, height, alignmentFactors }} value={value.display} />
  );
  return (
    <VizRepeater {...{ getValues, width, height, renderValue }} source={frames} autoGrid
      getAlignmentFactors={getDisplayValueAlignmentFactors} orientation={orientation ?? VizOrientation.Auto} />
  );
}

function Note({ text }) {
  return <div style={{ display: 'grid', placeItems: 'center', height: '100%' }}>{text}</div>;
}

function Content({ shown, width, height }) {
  const { panel } = shown;
  if (panel.type === 'heatmap') return <Note text="Grafana's heatmap is a part of Grafana itself, not of its components." />;
  const frames = framesOf(shown);
  if (!frames.length) return <Note text="No data" />;
  if (panel.type === 'stat') return <Numbers {...{ frames, panel, width, height }} />;
  const { options } = panel;
  return (
    <TimeSeries {...{ frames, timeRange, width, height, options }} structureRev={1} timeZone="utc" legend={options.legend}>
      {() => null}
    </TimeSeries>
  );
}

class Guarded extends React.Component {
  state = {};
  static getDerivedStateFromError(error) { return { error }; }
  render() { return this.state.error ? <pre data-error style={{ color: 'red' }}>{String(this.state.error)}</pre> : this.props.children; }
}

function Placed({ shown }) {
  const { gridPos: { x, y, w, h }, title, type, description } = shown.panel;
  const [width, height] = [w * COLUMN - GAP, h * ROW - GAP];
  const style = { position: 'absolute', left: x * COLUMN, top: y * ROW, width, height };
  if (type === 'row') return <h4 data-place style={style}>{title}</h4>;
  return (
    <div data-place style={style}>
      <PanelChrome {...{ title, description, width, height }}>
        {(width, height) => <Guarded><Content {...{ shown, width, height }} /></Guarded>}
      </PanelChrome>
    </div>
  );
}

// Icons come from Grafana's server, which is not there.
window.fetch = async () => new Response('<svg xmlns="http://www.w3.org/2000/svg" />');
// Grafana measures texts on a canvas, which does not wait for a font.
const fonts = [400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`));
Promise.all([initPluginTranslations('grafana'), ...fonts]).then(() => createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ position: 'absolute', inset: 0, background: theme.colors.background.canvas }}>
      {panels.map((shown, number) => <Placed key={number} shown={shown} />)}
    </div>
  </ThemeContext.Provider>,
));
