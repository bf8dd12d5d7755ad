// Pack the page into one HTML file: `node build.mjs FILE`. The same sources give the same bytes.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const read = (...path) => readFileSync(join(here, ...path), "utf8");

// The same digest as `sources_digest` in packed.py.
function sourcesDigest() {
  const names = ["build.mjs", "package.json", "package-lock.json", "page.html", "tsconfig.json"];
  names.push(...readdirSync(join(here, "src")).map((name) => `src/${name}`));
  const digest = createHash("sha256");
  for (const name of names.sort()) {
    const content = readFileSync(join(here, name));
    digest.update(`${name}\n${content.length}\n`).update(content);
  }
  return digest.digest("hex");
}

const packed = await build({
  absWorkingDir: here,
  entryPoints: ["src/main.ts"],
  outdir: "out",
  bundle: true,
  minify: true,
  write: false,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
const output = (ending) => packed.outputFiles.find((file) => file.path.endsWith(ending)).text.trim();
// A "</script" in the program would end it.
const script = output(".js").replaceAll("</script", "<\\/script");

const version = JSON.parse(read("package.json")).dependencies.uplot;
const licence = read("node_modules", "uplot", "LICENSE").trim().replaceAll("--", "- -");
const filled = {
  SCRIPT_DIGEST: `sha256-${createHash("sha256").update(script).digest("base64")}`,
  SOURCES_DIGEST: sourcesDigest(),
  LICENCES: `Rayloom, Apache-2.0. Packed with it: uPlot ${version}, under this licence:\n\n${licence}`,
  STYLE: output(".css"),
  SCRIPT: script,
};
const page = read("page.html").replace(/%([A-Z_]+)%/g, (_, name) => filled[name]);
writeFileSync(process.argv[2], page);
