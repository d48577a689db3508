// Unit tests of the page's reader of server-sent events: node --test tests/page
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { chat, events } from '../../crates/server/page/api.js';

/** A stream of bytes, cut into pieces of a size. */
function cut(text, size) {
  const bytes = new TextEncoder().encode(text);
  return new ReadableStream({
    start(controller) {
      for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
      controller.close();
    },
  });
}

async function all(iterable) {
  const found = [];
  for await (const item of iterable) found.push(item);
  return found;
}

test('events are the same however the bytes are cut', async () => {
  const stream = ': comment\n\ndata: {"a":"\u00e9\u{1f642}"}\n\ndata:x\r\ndata: y\r\n\r\nevent: e\nid: 7\ndata:  two\n\n\n\ndata: unfinished';
  for (let size = 1; size <= stream.length; size += 1) {
    assert.deepEqual(await all(events(cut(stream, size))), ['{"a":"\u00e9\u{1f642}"}', 'x\ny', ' two']);
  }
});

/** What `chat` makes of one answer of the server. */
async function answer(status, type, body) {
  globalThis.fetch = async () => new Response(cut(body, 5), { status, headers: { 'content-type': type } });
  return all(chat({}, { signal: new AbortController().signal }));
}

test('a stream must end as it should', async () => {
  const sse = 'text/event-stream; charset=utf-8';
  assert.deepEqual(await answer(200, sse, 'data: {"id":1}\n\ndata: [DONE]\n\ndata: {"id":2}\n\n'), [{ id: 1 }]);
  await assert.rejects(answer(200, sse, 'data: {"id":1}\n\n'), /broke off/);
  await assert.rejects(answer(200, sse, 'data: {"id":\n\n'), /not JSON/);
  await assert.rejects(answer(200, sse, 'data: {"error":{"message":"No."}}\n\n'), /^ApiError|No\./);
  await assert.rejects(answer(200, 'text/html', '<p>'), /not an event stream/);
});

test('a refusal carries the words of the server', async () => {
  await assert.rejects(answer(400, 'application/json', '{"error":{"message":"Too long."}}'), { message: 'Too long. (HTTP 400)', status: 400 });
  await assert.rejects(answer(404, 'application/json', '{"error":"Gone."}'), { message: 'Gone. (HTTP 404)' });
  await assert.rejects(answer(502, 'text/html', '<h1>Bad gateway'), { message: 'The server answered with HTTP 502.' });
  globalThis.fetch = () => Promise.reject(new TypeError('failed'));
  await assert.rejects(all(chat({}, { signal: new AbortController().signal })), { message: /does not answer/, status: 0 });
});

test('a proxy is told which conversation it is', async () => {
  let sent;
  globalThis.fetch = async (_, { headers }) => {
    sent = headers;
    return new Response('data: [DONE]\n\n', { headers: { 'content-type': 'text/event-stream' } });
  };
  await all(chat({}, { signal: new AbortController().signal, conversation: 'c-7' }));
  assert.equal(sent['x-conversation-id'], 'c-7');
});
