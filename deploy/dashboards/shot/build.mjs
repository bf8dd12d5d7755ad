// Pack page.jsx into page.js and page.css of the folder above; run in build/dashboards/npm.
import { builtinModules } from 'node:module';
import { build } from 'esbuild';

// Packages of Grafana's components import modules of Node that nothing uses in a browser.
const contents = `
class Nothing {}
module.exports = {
  Readable: Nothing, Writable: Nothing, Transform: Nothing, Duplex: Nothing, EventEmitter: Nothing,
  inherits() {}, promisify: (of) => of, inspect: String, format: String, isatty: () => false, types: {},
};`;
const withoutNode = {
  name: 'without-node',
  setup({ onResolve, onLoad }) {
    const filter = new RegExp(`^(node:)?(${builtinModules.join('|')})$`);
    onResolve({ filter }, ({ path }) => ({ path, namespace: 'nothing' }));
    onLoad({ filter: /.*/, namespace: 'nothing' }, () => ({ contents, loader: 'js' }));
  },
};

await build({
  entryPoints: ['page.jsx'],
  outdir: '..',
  bundle: true,
  minify: true,
  logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.png': 'dataurl', '.woff': 'empty', '.woff2': 'dataurl', '.ttf': 'empty' },
  plugins: [withoutNode],
});
