// A stand-in for the server: the page's files under its content security policy, and a chat completion whose answer
// follows the last message. Words in brackets in that message call for a failure or a fixture; see `answerTo`.
import { readFile } from 'node:fs/promises';
import http from 'node:http';
import { extname } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { HOSTILE, SHOWCASE } from './fixtures.mjs';

const PAGE = new URL('../../crates/server/page/', import.meta.url);
const TYPES = { '.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml' };
const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/** Starts the mock; with `key` it asks for that API key, with `loading` it says 503 that many times first. */
export async function startMock({ port = 0, key = null, loading = 0 } = {}) {
  const refusals = { left: 0 }; // answers to [500] that still fail
  const server = http.createServer(async (request, response) => {
    const path = new URL(request.url, 'http://mock').pathname;
    const send = (status, body) => {
      response.writeHead(status, { 'content-type': 'application/json' });
      response.end(JSON.stringify(body));
    };
    const fail = (status, message) => send(status, { error: { message, type: 'mock', code: null } });
    if (path === '/health') return loading-- > 0 ? fail(503, 'loading') : send(200, { status: 'ok' });
    if (path.startsWith('/v1/') && key && request.headers.authorization !== `Bearer ${key}`) return fail(401, 'The key is wrong.');
    if (path === '/v1/models') return send(200, { object: 'list', data: [{ id: 'mock-1b', object: 'model' }] });
    if (path === '/v1/chat/completions') {
      let text = '';
      for await (const piece of request) text += piece;
      return complete(JSON.parse(text), response, fail, refusals);
    }
    const name = path === '/' ? 'index.html' : path.slice(1);
    const type = TYPES[extname(name)];
    if (!type || !/^[a-z]+\.[a-z]+$/.test(name)) return fail(404, `There is no ${path}.`);
    const file = await readFile(new URL(name, PAGE)).catch(() => null);
    if (!file) return fail(404, `There is no ${path}.`);
    response.writeHead(200, { 'content-type': `${type}; charset=utf-8`, 'content-security-policy': POLICY });
    response.end(file);
  });
  await new Promise((resolve) => server.listen(port, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}/`,
    stop: () => new Promise((resolve) => (server.close(resolve), server.closeAllConnections())),
  };
}

/** What to say, how fast, and how to end. */
function answerTo(said) {
  if (said.includes('[showcase]')) return { text: SHOWCASE, pause: 4 };
  if (said.includes('[html]')) return { text: HOSTILE };
  if (said.includes('[slow]')) return { text: 'one more word '.repeat(400), pause: 15 };
  if (said.includes('[drop]')) return { text: 'This will not', end: 'drop' };
  if (said.includes('[broken]')) return { text: 'This neither', end: 'error' };
  if (said.includes('[long]')) return { text: 'Too long to be', finish: 'length' };
  return { text: `You said: ${said}` };
}

async function complete(body, response, fail, refusals) {
  const said = body.messages.at(-1).content;
  if (said.includes('[500]') && refusals.left++ === 0) return fail(500, 'The mock refuses this once.');
  if (said.includes('[page]')) {
    response.writeHead(200, { 'content-type': 'text/html' });
    return response.end('<p>A portal.</p>');
  }
  const { text, pause = 1, end, finish = 'stop' } = answerTo(said);
  const thinks = body.chat_template_kwargs?.enable_thinking !== false;
  response.writeHead(200, { 'content-type': 'text/event-stream' });
  const event = (fields, delta, reason = null) => {
    const chunk = { id: 'chatcmpl-1', object: 'chat.completion.chunk', model: 'mock-1b', ...fields };
    if (delta) chunk.choices = [{ index: 0, delta, finish_reason: reason }];
    response.write(`data: ${JSON.stringify(chunk)}\n\n`);
  };
  event({}, { role: 'assistant', content: '' });
  const thoughts = thinks ? 'The reader wants an **answer**. Here is one.'.match(/\S+\s*/g) : [];
  for (const word of thoughts) {
    event({}, { reasoning_content: word });
    await sleep(pause);
  }
  // Pieces of four characters, so that marks arrive cut in the middle.
  for (let at = 0; at < text.length && !response.destroyed; at += 4) {
    event({}, { content: text.slice(at, at + 4) });
    await sleep(pause);
  }
  if (end === 'drop') {
    await sleep(100); // else the browser throws away what it has not handed over yet
    return response.destroy();
  }
  if (end === 'error') {
    response.write(`: a comment\n\ndata: ${JSON.stringify({ error: { message: 'The mock gave up.' } })}\n\n`);
    return response.end();
  }
  event({}, {}, finish);
  const tokens = Math.ceil(text.length / 4) + thoughts.length;
  event({
    choices: [],
    usage: { prompt_tokens: 1234, completion_tokens: tokens, prompt_tokens_details: { cached_tokens: 1200 } },
    timings: { prompt_n: 34, prompt_ms: 12, predicted_n: tokens, predicted_ms: 100, predicted_per_second: 87.65 },
  });
  response.end('data: [DONE]\n\n');
}

if (process.argv[1] === import.meta.filename) console.log((await startMock({ port: Number(process.argv[2] ?? 8080) })).url);
