// Builds server/playground/vendor from the packages of package-lock.json: one module, two fonts, and their licences.
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = path.dirname(fileURLToPath(import.meta.url));
const vendor = path.join(here, "../../server/playground/vendor");
const FONTS = { inter: "inter-latin-wght-normal.woff2", "jetbrains-mono": "jetbrains-mono-latin-wght-normal.woff2" };

/** Folders below node_modules of the packages that a list of input files is from. */
function packagesOf(files) {
  const names = files.map((file) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1]);
  return [...new Set(names.filter(Boolean))].sort();
}

async function licenceOf(name) {
  const folder = path.join(here, "node_modules", name);
  const { version, license } = JSON.parse(await readFile(path.join(folder, "package.json"), "utf8"));
  const file = (await readdir(folder)).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} has no licence file`);
  const text = (await readFile(path.join(folder, file), "utf8")).trim();
  return `${"=".repeat(80)}\n${name} ${version} (${license})\n${"=".repeat(80)}\n\n${text}\n`;
}

await mkdir(vendor, { recursive: true });
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: ["codemirror.js"],
  outfile: path.join(vendor, "codemirror.js"),
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "none", // all licences are in LICENSES.txt
  metafile: true,
});
for (const [name, file] of Object.entries(FONTS)) {
  await copyFile(
    path.join(here, "node_modules/@fontsource-variable", name, "files", file),
    path.join(vendor, `${name}.woff2`),
  );
}
const packages = packagesOf(Object.keys(metafile.inputs)).concat(
  Object.keys(FONTS).map((name) => `@fontsource-variable/${name}`),
);
const licences = await Promise.all(packages.map(licenceOf));
await writeFile(
  path.join(vendor, "LICENSES.txt"),
  `What this folder is made of. scripts/playground builds it.\n\n${licences.join("\n")}`,
);
