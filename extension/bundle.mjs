// The notebook's drawings, built into the package: `node bundle.mjs` writes them, `node bundle.mjs --check` says which are
// not what the sources build. They are committed, so that a checkout without node has them.
import { readFileSync, writeFileSync } from 'node:fs';
import { build } from 'esbuild';

const PLACE = '../rlbench/notebook/static';
const WIDGETS = {
  chat: 'chat',
  dashboard: 'dashboard',
  head: 'dashboard_head',
  viewer: 'rollout_viewer'
};
const PAGES = { page: 'rollout_page' };

async function built(entries, format) {
  const { outputFiles } = await build({
    entryPoints: Object.entries(entries).map(([name, out]) => ({
      in: `src/widgets/${name}.ts`,
      out
    })),
    banner: { js: '// Built from extension/src/widgets by extension/bundle.mjs: change those.' },
    bundle: true,
    charset: 'utf8',
    format,
    legalComments: 'none',
    logLevel: 'error',
    outdir: PLACE,
    target: 'es2022',
    write: false
  });
  return outputFiles;
}

const files = [...(await built(WIDGETS, 'esm')), ...(await built(PAGES, 'iife'))];
if (process.argv.includes('--check')) {
  const old = files.filter(({ path, text }) => readFileSync(path, 'utf8') !== text);
  if (old.length) {
    const names = old.map(({ path }) => path).join('\n  ');
    console.error(
      `not what extension/src/widgets builds (jlpm build:widgets makes them anew):\n  ${names}`
    );
    process.exit(1);
  }
} else {
  files.forEach(({ path, text }) => writeFileSync(path, text));
}
