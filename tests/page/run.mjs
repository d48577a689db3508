// Drives the chat page in headless Chromium ($CHROMIUM, else /usr/bin/chromium); `npm ci` here comes first.
//
//   node tests/page/run.mjs                                   against the mock, with its failures
//   node tests/page/run.mjs http://127.0.0.1:8080/            against a running server
//   node tests/page/run.mjs 'kipp serve --port {port}'        against a server that it starts and stops itself
//   ... --only WORD    only the cases whose name holds WORD; --shots DIR writes screenshots
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import net from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { isDeepStrictEqual, parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import { cases } from './cases.mjs';
import { startMock } from './mock.mjs';

const { values: flags, positionals } = parseArgs({
  allowPositionals: true,
  options: { only: { type: 'string', default: '' }, shots: { type: 'string' } },
});
const AXE = await readFile(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const CHROMIUM = process.env.CHROMIUM ?? '/usr/bin/chromium';

/** A started server: { url, kind, stop }; a server that was given by its address cannot be stopped. */
async function startServer(options) {
  const [target] = positionals;
  if (target === undefined) return { kind: 'mock', ...(await startMock(options)) };
  if (/^https?:/.test(target)) return { kind: 'address', url: target, stop: async () => {} };
  const port = options?.port ?? (await freePort());
  const [program, ...words] = target.replaceAll('{port}', port).split(/\s+/);
  const child = spawn(program, words, { stdio: ['ignore', 'ignore', 'pipe'] });
  let complaints = '';
  child.stderr.on('data', (bytes) => (complaints = (complaints + bytes).slice(-2000)));
  const url = `http://127.0.0.1:${port}/`;
  const ended = new Promise((resolve) => child.on('exit', resolve));
  for (let tries = 0; (await fetch(`${url}health`).catch(() => null))?.status !== 200; tries += 1) {
    if (tries > 300 || child.exitCode !== null) throw new Error(`${target} is not ready:\n${complaints}`);
    await sleep(200);
  }
  return { kind: 'command', url, stop: () => (child.kill(), ended) };
}

function freePort() {
  return new Promise((resolve) => {
    const probe = net.createServer().listen(0, '127.0.0.1', () => {
      const { port } = probe.address();
      probe.close(() => resolve(port));
    });
  });
}

/** What a case gets: a fresh page, and short names for what every case does. */
async function openPage(browser, server, options) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, acceptDownloads: true, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(20_000);
  const complaints = [];
  const requests = [];
  page.on('pageerror', (error) => complaints.push(`error: ${error.message}`));
  page.on('console', (message) => {
    // A failed request is reported by the browser itself; cases that provoke one look at the page instead.
    if (message.type() === 'error' && !/Failed to load resource/.test(message.text())) complaints.push(message.text());
  });
  page.on('request', (request) => {
    if (!request.url().startsWith(server.url) && !/^(blob|data):/.test(request.url())) complaints.push(`outside request: ${request.url()}`);
    if (request.url().endsWith('/chat/completions')) requests.push(request.postDataJSON());
  });
  await page.goto(server.url);
  const kit = {
    page,
    context,
    server,
    startServer,
    requests,
    complaints,
    said: page.locator('.turn.user .said'),
    answers: page.locator('.turn.assistant'),
    /** Types a message and sends it with Enter. */
    async send(text) {
      await page.fill('#prompt', text);
      await page.press('#prompt', 'Enter');
    },
    /** Waits until nothing streams any more. */
    async done() {
      await page.locator('#send').waitFor();
      assert.equal(await page.locator('[aria-busy=true]').count(), 0);
    },
    /** Waits until the elements have exactly these texts. */
    async shows(locator, texts) {
      for (let tries = 0; tries < 50; tries += 1) {
        if (isDeepStrictEqual(await locator.allInnerTexts(), texts)) return;
        await sleep(100);
      }
      assert.deepEqual(await locator.allInnerTexts(), texts);
    },
    async thinking(on) {
      await page.locator('#thinking').setChecked(on);
    },
    /** The serious findings of axe, as lines. */
    async axe() {
      await page.evaluate(AXE); // through the debugger, since the page's policy forbids scripts from elsewhere
      const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }));
      return violations.flatMap(({ id, impact, nodes }) => nodes.map((node) => `${impact} ${id}: ${node.html.slice(0, 120)}`));
    },
    async shot(name) {
      if (flags.shots) await page.screenshot({ path: `${flags.shots}/${name}.png` });
    },
  };
  return kit;
}

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ['--no-sandbox'] });
const server = await startServer();
let passed = 0;
let failed = 0;
for (const { name, needs = 'any', options, run } of cases) {
  const fits = needs === 'any' || needs === server.kind || (needs === 'stoppable' && server.kind !== 'address');
  if (!fits || !name.includes(flags.only)) continue;
  const kit = await openPage(browser, server, options);
  try {
    await run(kit);
    assert.deepEqual(kit.complaints, []);
    passed += 1;
    console.log(`ok    ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL  ${name}\n${error.stack.replaceAll(/^/gm, '      ')}`);
    await kit.shot(`failed-${failed}`);
  }
  await kit.context.close();
}
await browser.close();
await server.stop();
console.log(`${passed} passed, ${failed} failed`);
process.exitCode = failed > 0 || passed === 0 ? 1 : 0;
