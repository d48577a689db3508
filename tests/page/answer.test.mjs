// Unit tests of what the page asks and what it makes of a stream: node --test tests/page
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { receiver, requestFor, titleOf, toMarkdown } from '../../crates/server/page/answer.js';
import { loadSettings, newMessage, readConversation } from '../../crates/server/page/store.js';

test('a request names only what was chosen', () => {
  const conversation = { messages: [newMessage('user', 'a'), { ...newMessage('assistant'), reasoning: 'r' }, newMessage('user', 'b')] };
  const plain = requestFor(conversation, loadSettings(), '');
  assert.deepEqual(JSON.parse(JSON.stringify(plain)), {
    messages: [{ role: 'user', content: 'a' }, { role: 'user', content: 'b' }],
    stream: true,
    stream_options: { include_usage: true },
  });
  const chosen = { ...loadSettings(), system: ' s ', temperature: 0, seed: 7, thinking: false };
  const request = requestFor(conversation, chosen, 'm');
  assert.deepEqual(request.messages[0], { role: 'system', content: 's' });
  assert.deepEqual([request.model, request.temperature, request.seed], ['m', 0, 7]);
  assert.deepEqual(request.chat_template_kwargs, { enable_thinking: false });
  assert.ok(!('top_p' in request));
});

test('a stream is put together with its figures', () => {
  const message = { ...newMessage('assistant'), state: 'streaming' };
  const receive = receiver(message);
  const delta = (fields, reason = null) => ({ choices: [{ index: 0, delta: fields, finish_reason: reason }] });
  receive(delta({ role: 'assistant', content: '' }), 50);
  assert.equal(message.stats.firstMs, undefined);
  receive(delta({ reasoning_content: 'think ' }), 100);
  receive(delta({ reasoning: 'more' }), 300);
  receive(delta({ content: '\n\n' }), 350);
  receive(delta({ content: 'Yes' }), 600);
  assert.equal(message.reasoning, 'think more');
  assert.equal(message.content, 'Yes');
  assert.equal(message.thoughtMs, 250);
  assert.deepEqual(message.stats, { firstMs: 100, tokens: 4, perSecond: 6 });
  receive(delta({}, 'length'), 700);
  receive({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 9, prompt_tokens_details: { cached_tokens: 3 } } }, 700);
  receive({ choices: [], timings: { predicted_per_second: 12.5 } }, 700);
  assert.equal(message.state, 'length');
  assert.deepEqual(message.stats, { firstMs: 100, tokens: 9, perSecond: 12.5, promptTokens: 5, cached: 3, counted: true });
});

test('titles and export', () => {
  assert.equal(titleOf('  first line \nsecond'), 'first line ');
  assert.equal(titleOf('x'.repeat(80)).length, 60);
  const messages = [newMessage('user', 'q'), { ...newMessage('assistant', 'a'), reasoning: 'r\n\ns\n', state: 'done' }];
  const text = toMarkdown({ title: 't', created: 0, messages });
  assert.equal(text, '# t\n\n1970-01-01T00:00:00.000Z\n\n## You\n\nq\n\n## kipp\n\n> r\n> \n> s\n\na\n');
});

test('only whole records are conversations', () => {
  const good = { id: 'i', title: 't', created: 1, updated: 2, messages: [{ id: 'm', role: 'assistant', content: 'c', state: 'done' }] };
  assert.deepEqual(readConversation(JSON.stringify(good)), good);
  const broken = [
    null, 7, [], {}, { ...good, id: 1 }, { ...good, updated: null }, { ...good, messages: {} }, { ...good, messages: [null] },
    ...[{ role: 'system' }, { content: null }, { state: 'odd' }, { reasoning: 1 }, { error: {} }, { stats: 3 }, { stats: null }]
      .map((change) => ({ ...good, messages: [{ ...good.messages[0], ...change }] })),
  ];
  for (const value of broken) assert.equal(readConversation(JSON.stringify(value)), null, JSON.stringify(value));
  assert.equal(readConversation('{'), null);
});
