// What the page must do, one case each. `needs`: 'any' server, one that is 'stoppable', or the 'mock' and its fixtures.
import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';

export const cases = [];
const add = (name, needs, run, options) => cases.push({ name, needs, run, options });

// Conversing --------------------------------------------------------------------------------------------------------

add('send: the answer streams in, with its figures', 'any', async ({ page, send, done, said, answers, requests }) => {
  await send('Hello there');
  await done();
  assert.equal(await said.innerText(), 'Hello there');
  assert.notEqual((await answers.locator('.said').innerText()).trim(), '');
  assert.match(await answers.locator('.stats').innerText(), /^[\d,.]+ tokens\/s \u00b7 \d+ tokens?/);
  assert.equal(requests[0].stream, true);
  assert.deepEqual(requests[0].messages, [{ role: 'user', content: 'Hello there' }]);
  assert.equal(await page.locator('#prompt').inputValue(), '');
  assert.equal(await page.title(), 'Hello there - kipp');
});

add('stream: words appear before the end and never go away', 'mock', async ({ page, send, done }) => {
  await page.evaluate(() => {
    window.seen = [];
    const look = () => {
      const said = document.querySelector('.turn.assistant .said');
      if (said && window.seen.at(-1) !== said.textContent) window.seen.push(said.textContent);
      requestAnimationFrame(look);
    };
    look();
  });
  await send('[showcase]');
  await done();
  const seen = await page.evaluate(() => window.seen);
  assert.ok(seen.length > 5, `${seen.length} states seen`);
  seen.reduce((before, after) => {
    const words = before.match(/\p{L}{3,}(?=\W)/gu) ?? [];
    for (const word of words) assert.ok(after.includes(word), `"${word}" went away: ${JSON.stringify(after.slice(-200))}`);
    return after;
  });
});

add('stream: elements already shown are kept, and a selection in them', 'mock', async ({ page, send, done }) => {
  await send('[slow]');
  await page.locator('.assistant .said p').waitFor();
  await page.evaluate(() => {
    window.first = document.querySelector('.assistant .said p');
    getSelection().setBaseAndExtent(window.first.firstChild, 0, window.first.firstChild, 3);
  });
  await page.waitForTimeout(500);
  assert.equal(await page.evaluate(() => getSelection().toString()), 'one');
  assert.ok(await page.evaluate(() => window.first.isConnected));
  await page.locator('#stop').click();
  await done();
});

add('a conversation sends what was said before, without the thinking', 'any', async ({ send, done, requests, answers }) => {
  await send('First');
  await done();
  const { length } = requests;
  await send('Second');
  await done();
  const roles = requests[length].messages.map(({ role }) => role);
  assert.deepEqual(roles, ['user', 'assistant', 'user']);
  assert.ok(!JSON.stringify(requests[length]).includes('reasoning'));
  assert.equal(await answers.count(), 2);
});

add('stop: the answer ends at once and what came is kept', 'any', async ({ page, send, done, answers, server }) => {
  // A small model ends early; on its way to the server the request is told not to.
  await page.route('**/chat/completions', (route) => {
    const body = route.request().postDataJSON();
    route.continue({ postData: server.kind === 'mock' ? body : { ...body, ignore_eos: true } });
  });
  await send('[slow]');
  await page.locator('.assistant .said:not(:empty), .assistant .thought:not([hidden])').first().waitFor();
  await page.locator('#stop').click();
  await done();
  const before = await answers.innerText();
  await page.waitForTimeout(300);
  assert.equal(await answers.innerText(), before);
  assert.match(before, /Stopped before the end/);
});

add('stop with Escape', 'mock', async ({ page, send, done, answers }) => {
  await send('[slow]');
  await page.locator('.assistant .said:not(:empty)').waitFor();
  await page.keyboard.press('Escape');
  await done();
  assert.match(await answers.innerText(), /Stopped before the end/);
});

add('regenerate: asks again with the same messages', 'any', async ({ page, send, done, answers, requests }) => {
  await send('Say something');
  await done();
  await answers.getByRole('button', { name: 'Regenerate' }).click();
  await done();
  assert.equal(await answers.count(), 1);
  assert.deepEqual(requests[1].messages, requests[0].messages);
  assert.ok(await page.locator('#prompt').evaluate((box) => box === document.activeElement));
});

add('edit and resend: replaces the message and all below it', 'any', async ({ shows, page, send, done, said, answers, requests }) => {
  await send('One');
  await done();
  await send('Two');
  await done();
  await page.getByRole('button', { name: 'Edit' }).first().click();
  const box = page.getByLabel('Edit your message');
  assert.equal(await box.inputValue(), 'One');
  await box.fill('Uno');
  await page.getByRole('button', { name: 'Send again' }).click();
  await done();
  await shows(said, ['Uno']);
  assert.equal(await answers.count(), 1);
  assert.deepEqual(requests.at(-1).messages, [{ role: 'user', content: 'Uno' }]);
});

add('edit: Escape leaves everything as it was', 'any', async ({ shows, page, send, done, said }) => {
  await send('One');
  await done();
  await page.getByRole('button', { name: 'Edit' }).click();
  await page.getByLabel('Edit your message').fill('other');
  await page.keyboard.press('Escape');
  await shows(said, ['One']);
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Edit');
});

add('thinking is folded and can be unfolded', 'mock', async ({ page, send, done, answers }) => {
  await send('Hello');
  await done();
  const thought = answers.locator('.thought');
  assert.equal(await thought.getAttribute('open'), null);
  assert.match(await thought.locator('summary').innerText(), /^Thought /);
  assert.ok(!(await thought.locator('.text').isVisible()));
  await thought.locator('summary').click();
  assert.equal(await thought.locator('strong').innerText(), 'answer');
  assert.ok(!(await answers.locator('.said').innerText()).includes('reader'));
});

add('thinking can be switched off, and stays off', 'any', async ({ page, send, done, answers, requests, thinking }) => {
  await thinking(false);
  await page.reload();
  await send('Hello');
  await done();
  assert.deepEqual(requests[0].chat_template_kwargs, { enable_thinking: false });
  assert.ok(!(await answers.locator('.thought').isVisible()));
});

add('the reader may scroll up while it streams, and go back to the end', 'mock', async ({ page, send, done }) => {
  await page.setViewportSize({ width: 360, height: 480 });
  await send('[slow]');
  await page.waitForFunction(() => document.querySelector('#log').scrollTop > 100);
  await page.locator('#log').evaluate((log) => (log.scrollTop = 0));
  await page.locator('#latest').waitFor();
  await page.waitForTimeout(200);
  assert.equal(await page.locator('#log').evaluate((log) => log.scrollTop), 0);
  await page.locator('#latest').click();
  await page.waitForTimeout(200);
  const gap = await page.locator('#log').evaluate((log) => log.scrollHeight - log.scrollTop - log.clientHeight);
  assert.ok(gap < 24, `${gap} pixels from the end`);
  await page.locator('#stop').click();
  await done();
});

// Conversations -----------------------------------------------------------------------------------------------------

add('reload keeps the conversation', 'any', async ({ shows, page, send, done, said, answers }) => {
  await send('Remember me');
  await done();
  const before = await answers.innerText();
  await page.reload();
  await shows(said, ['Remember me']);
  assert.equal(await answers.innerText(), before);
});

add('reload while streaming keeps what had come', 'mock', async ({ page, send, answers }) => {
  await send('[slow]');
  await page.locator('.assistant .said:not(:empty)').waitFor();
  await page.reload();
  assert.match(await answers.innerText(), /one[^]*Stopped before the end/);
});

add('new, rename, export and delete', 'any', async ({ shows, page, send, done, said }) => {
  await send('First conversation');
  await done();
  await page.getByRole('button', { name: 'New conversation' }).click();
  assert.equal(await said.count(), 0);
  await send('Second conversation');
  await done();
  const list = page.locator('#conversations .open');
  await shows(list, ['Second conversation', 'First conversation']);

  await page.locator('#conversations').getByRole('button', { name: 'Rename' }).click();
  await page.locator('#ask-value').fill('Renamed');
  await page.keyboard.press('Enter');
  await shows(list, ['Renamed', 'First conversation']);

  const [file] = await Promise.all([
    page.waitForEvent('download'),
    page.locator('#conversations').getByRole('button', { name: 'Export' }).click(),
  ]);
  assert.equal(file.suggestedFilename(), 'Renamed.md');
  assert.match(await readFile(await file.path(), 'utf8'), /^# Renamed\n[^]*## You\n\nSecond conversation\n\n## kipp\n/);

  await page.locator('#conversations').getByRole('button', { name: 'Delete' }).click();
  await page.locator('#ask').getByRole('button', { name: 'Cancel' }).click();
  assert.equal(await list.count(), 2);
  await page.locator('#conversations').getByRole('button', { name: 'Delete' }).click();
  await page.locator('#ask').getByRole('button', { name: 'Delete' }).click();
  await shows(list, ['First conversation']);
  await list.click();
  await shows(said, ['First conversation']);
  await page.reload();
  await shows(list, ['First conversation']);
});

add('two conversations stream at once', 'mock', async ({ shows, page, send, done, said, answers }) => {
  await send('[slow] one');
  await page.locator('.assistant .said:not(:empty)').waitFor();
  await page.getByRole('button', { name: 'New conversation' }).click();
  await send('quick');
  await done();
  assert.match(await answers.innerText(), /You said: quick/);
  await page.getByRole('button', { name: '[slow] one' }).click();
  await page.locator('#stop').click();
  await done();
  await shows(said, ['[slow] one']);
});

add('two tabs see the same conversations', 'any', async ({ page, context, server, send, done }) => {
  const other = await context.newPage();
  await other.goto(server.url);
  await send('From the first tab');
  await done();
  await other.locator('#conversations .open').click();
  await other.locator('.turn.user', { hasText: 'From the first tab' }).waitFor();
});

add('corrupt records cost nothing but themselves', 'any', async ({ shows, page, send, done, said }) => {
  await send('Healthy');
  await done();
  await page.evaluate(() => {
    const keep = (id, text) => localStorage.setItem(`kipp.conversation.${id}`, text);
    const base = { id: 'e', title: 't', created: 1, updated: 1, messages: [] };
    keep('a', '{"id": "a", "titl');
    keep('b', 'null');
    keep('c', '[]');
    keep('d', JSON.stringify({ ...base, id: 'another' }));
    keep('e', JSON.stringify({ ...base, messages: [{ id: '1', role: 'assistant', content: 7 }] }));
    localStorage.setItem('kipp.settings', '{"temperature": "hot", "system": 3, "thinking"');
    localStorage.setItem('kipp.theme', '<b>');
  });
  await page.reload();
  await shows(said, ['Healthy']);
  await page.locator('#notice', { hasText: 'could not be read and were left as they are: 5' }).waitFor();
  assert.equal(await page.evaluate(() => localStorage.getItem('kipp.conversation.b')), 'null');
  await page.locator('#notice button').click();
  await page.locator('#notice').waitFor({ state: 'hidden' });
  await send('Still works');
  await done();
});

add('a full storage is said, and the page goes on', 'any', async ({ page, send, done, answers }) => {
  await page.evaluate(() => {
    for (let size = 1 << 20; size >= 1; size >>= 1) {
      try {
        for (let n = 0; ; n += 1) localStorage.setItem(`fill-${size}-${n}`, 'x'.repeat(size));
      } catch {
        // Full at this size; smaller pieces follow.
      }
    }
  });
  await send('No room');
  await done();
  assert.match(await page.locator('#notice').innerText(), /no room left/);
  assert.equal(await answers.count(), 1);
});

add('deleting or resending while it streams leaves nothing behind', 'mock', async ({ page, shows, send, done, said, answers }) => {
  await send('[slow]');
  await page.locator('.assistant .said:not(:empty)').waitFor();
  await page.getByRole('button', { name: 'Edit' }).click();
  await page.getByLabel('Edit your message').fill('[slow] again');
  await page.getByRole('button', { name: 'Send again' }).click();
  await page.locator('.assistant .said:not(:empty)').waitFor();
  await shows(said, ['[slow] again']);
  assert.equal(await answers.count(), 1);
  await page.locator('#conversations').getByRole('button', { name: 'Delete' }).click();
  await page.locator('#ask').getByRole('button', { name: 'Delete' }).click();
  await done();
  await page.waitForTimeout(1500); // longer than the page waits between two savings
  await shows(page.locator('#conversations li'), []);
  assert.deepEqual(await page.evaluate(() => Object.keys(localStorage)), []);
});

add('without storage the page works and says what is lost', 'any', async ({ page, context, send, done, answers }) => {
  await context.addInitScript(() => {
    const forbidden = { get: () => { throw new DOMException('forbidden', 'SecurityError'); } };
    Object.defineProperty(window, 'localStorage', forbidden);
    Object.defineProperty(window, 'sessionStorage', forbidden);
  });
  await page.reload();
  await page.locator('#notice', { hasText: 'forbids storage' }).waitFor();
  await send('Hello');
  await done();
  assert.equal(await answers.count(), 1);
});

// Settings ----------------------------------------------------------------------------------------------------------

add('system prompt and sampling settings reach the server', 'any', async ({ page, send, done, requests }) => {
  await page.getByRole('button', { name: 'Settings' }).click();
  await page.getByLabel('System prompt').fill('Be brief.');
  await page.getByLabel('Temperature').fill('0.25');
  await page.getByLabel('Top p').fill('0.9');
  await page.getByLabel('Top k').fill('40');
  await page.getByLabel('Min p').fill('0.05');
  await page.getByLabel('Max tokens').fill('16');
  await page.getByLabel('Seed').fill('7');
  await page.keyboard.press('Enter');
  await page.reload();
  await send('Hello');
  await done();
  const { messages, temperature, top_p, top_k, min_p, max_tokens, seed } = requests[0];
  assert.deepEqual(messages[0], { role: 'system', content: 'Be brief.' });
  assert.deepEqual([temperature, top_p, top_k, min_p, max_tokens, seed], [0.25, 0.9, 40, 0.05, 16, 7]);
});

add('settings that make no sense are not taken', 'any', async ({ page, send, done, requests }) => {
  await page.getByRole('button', { name: 'Settings' }).click();
  await page.getByLabel('Temperature').fill('-1');
  await page.getByRole('button', { name: 'Save' }).click();
  assert.ok(await page.locator('#settings').isVisible());
  await page.getByRole('button', { name: 'Cancel' }).click();
  await send('Hello');
  await done();
  assert.ok(!('temperature' in requests[0]));
});

add('the theme follows the system until it is switched', 'any', async ({ page }) => {
  const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  await page.emulateMedia({ colorScheme: 'dark' });
  const dark = await paper();
  await page.emulateMedia({ colorScheme: 'light' });
  const light = await paper();
  assert.notEqual(dark, light);
  await page.getByRole('button', { name: 'Dark theme' }).click();
  assert.equal(await paper(), dark);
  await page.reload();
  assert.equal(await paper(), dark);
  await page.getByRole('button', { name: 'Light theme' }).click();
  assert.equal(await page.evaluate(() => localStorage.getItem('kipp.theme')), null);
});

add('an API key is asked for, kept and sent', 'mock', async ({ page, startServer, send, done, answers, complaints }) => {
  const locked = await startServer({ key: 'secret' });
  await page.goto(locked.url);
  complaints.length = 0; // the other server's address counts as outside
  await page.locator('#notice', { hasText: 'asks for an API key' }).waitFor();
  await send('Hello');
  await page.locator('.outcome.failed', { hasText: 'The key is wrong. (HTTP 401)' }).waitFor();
  await page.locator('#notice button').click();
  await page.getByLabel('API key').fill('secret');
  await page.getByRole('button', { name: 'Save' }).click();
  await page.locator('#notice').waitFor({ state: 'hidden' });
  await page.getByRole('button', { name: 'Try again' }).click();
  await done();
  assert.match(await answers.innerText(), /You said: Hello/);
  complaints.length = 0;
  await locked.stop();
});

// Failures ----------------------------------------------------------------------------------------------------------

add('a server that stops is said, and trying again works once it is back', 'stoppable', async (kit) => {
  const { page, startServer, send, done, answers, complaints } = kit;
  let own = await startServer();
  const port = Number(new URL(own.url).port);
  await page.goto(own.url);
  await send('Before');
  await done();
  await own.stop();
  await send('After');
  await page.locator('.outcome.failed', { hasText: 'The server does not answer' }).waitFor();
  own = await startServer({ port });
  await page.getByRole('button', { name: 'Try again' }).click();
  await done();
  assert.equal(await answers.count(), 2);
  assert.equal(await page.locator('.outcome.failed').count(), 0);
  complaints.length = 0;
  await own.stop();
});

add('a refusal is shown in the server\'s words, with a way to try again', 'mock', async ({ page, send, done, answers }) => {
  await send('[500] please');
  await page.locator('.outcome.failed', { hasText: 'The mock refuses this once. (HTTP 500)' }).waitFor();
  await page.getByRole('button', { name: 'Try again' }).click();
  await done();
  assert.match(await answers.innerText(), /You said: \[500\] please/);
});

for (const [word, message] of [
  ['[drop]', 'The connection broke off before the answer was complete.'],
  ['[broken]', 'The mock gave up.'],
  ['[page]', 'The answer is not an event stream.'],
]) {
  add(`a failure within the stream is said: ${word}`, 'mock', async ({ page, send, done, answers }) => {
    await send(word);
    await page.locator('.outcome.failed', { hasText: message }).waitFor();
    if (word !== '[page]') assert.match(await answers.innerText(), /This/);
    await page.reload();
    await page.locator('.outcome.failed', { hasText: message }).waitFor();
    await done();
  });
}

add('an answer cut by its limit says so', 'mock', async ({ page, send }) => {
  await send('[long]');
  await page.locator('.outcome', { hasText: 'The limit on tokens was reached.' }).waitFor();
});

add('a model that is still loading is waited for', 'mock', async ({ page, startServer, complaints }) => {
  const slow = await startServer({ loading: 2 });
  await page.goto(slow.url);
  await page.locator('#notice', { hasText: 'The model is loading.' }).waitFor();
  await page.locator('#notice').waitFor({ state: 'hidden' });
  assert.equal(await page.locator('#model').inputValue(), 'mock-1b');
  complaints.length = 0;
  await slow.stop();
});

// Safety ------------------------------------------------------------------------------------------------------------

add('markup in an answer stays text', 'mock', async ({ page, send, done, answers }) => {
  await send('[html] <img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>');
  await done();
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  const tags = await page.locator('#turns').evaluate((turns) => [...turns.querySelectorAll('*')].map(({ localName }) => localName));
  for (const tag of ['script', 'img', 'svg', 'iframe', 'style', 'meta']) assert.ok(!tags.includes(tag), tag);
  const targets = await answers.locator('a').evaluateAll((links) => links.map((link) => [link.getAttribute('href'), link.rel]));
  assert.deepEqual(targets, [
    ['https://example.org/tracker.png', 'noopener noreferrer'],
    ['https://example.org/', 'noopener noreferrer'],
  ].slice(0, targets.length));
  const text = await answers.innerText();
  for (const piece of ['<script>window.hacked = 1</script>', '[press me](javascript:window.hacked=1)', '&lt;b&gt;', 'End.']) {
    assert.ok(text.includes(piece), piece);
  }
});

add('the policy of the page is strict and nothing breaks it', 'any', async ({ page, server }) => {
  const response = await fetch(server.url);
  const policy = response.headers.get('content-security-policy') ?? '';
  for (const rule of ["default-src 'none'", "script-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"]) {
    assert.ok(policy.includes(rule), `${rule} is not in ${policy}`);
  }
  assert.ok(!policy.includes('unsafe'));
  const html = await response.text();
  assert.ok(!/ style=| on[a-z]+=|<script>/.test(html));
});

// Everyone ----------------------------------------------------------------------------------------------------------

add('the keyboard alone is enough', 'mock', async ({ shows, page, send, done, said, answers }) => {
  const tabTo = async (name) => {
    for (let steps = 0; steps < 60; steps += 1) {
      await page.keyboard.press('Tab');
      const focused = await page.evaluate(() => document.activeElement.textContent.trim() || document.activeElement.id);
      if (focused === name) {
        const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
        assert.notEqual(outline, 'none', `${name} shows its focus`);
        return;
      }
    }
    assert.fail(`Tab does not reach ${name}`);
  };
  assert.equal(await page.evaluate(() => document.activeElement.id), 'prompt');
  await page.locator('.skip').focus();
  await page.keyboard.press('Enter');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'prompt');
  await page.keyboard.type('line one');
  await page.keyboard.press('Shift+Enter');
  await page.keyboard.type('line two');
  await page.keyboard.press('Enter');
  await done();
  await shows(said, ['line one\nline two']);
  assert.equal(await page.evaluate(() => document.activeElement.id), 'prompt');

  await page.locator('.skip').focus();
  await tabTo('Settings');
  await page.keyboard.press('Enter');
  assert.ok(await page.locator('#settings').isVisible());
  await page.keyboard.press('Escape');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'open-settings');
  await tabTo('Edit');
  await page.keyboard.press('Enter');
  await page.keyboard.press('Control+A');
  await page.keyboard.type('again');
  await page.keyboard.press('Control+Enter');
  await done();
  await shows(said, ['again']);
  await page.locator('#log').focus();
  await tabTo('Regenerate');
  await page.keyboard.press('Enter');
  await done();
  assert.equal(await answers.count(), 1);
  await page.locator('.skip').focus();
  await tabTo('Rename');
  await page.keyboard.press('Enter');
  await page.keyboard.type('By hand');
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { name: 'By hand' }).waitFor();
  assert.equal(await page.evaluate(() => document.activeElement.textContent), 'Rename');
});

add('on a touch screen Enter starts a line', 'any', async ({ page, done, said }) => {
  await page.fill('#prompt', 'one');
  await page.press('#prompt', 'Enter');
  assert.equal(await page.locator('#prompt').inputValue(), 'one\n');
  await page.getByRole('button', { name: 'Send' }).tap();
  await done();
  assert.equal(await said.innerText(), 'one');
}, { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true });

add('a screen reader hears that it answers, then the answer once', 'mock', async ({ page, send, done }) => {
  await page.evaluate(() => {
    window.heard = [];
    new MutationObserver((records) => {
      for (const { addedNodes } of records) for (const node of addedNodes) window.heard.push(node.textContent);
    }).observe(document.querySelector('#live'), { childList: true });
  });
  await send('[showcase]');
  await done();
  const heard = await page.evaluate(() => window.heard);
  assert.equal(heard[0], 'Answering');
  assert.equal(heard[1], 'A short tour');
  assert.equal(heard.filter((line) => line === 'Steps').length, 1);
  assert.match(heard.at(-1), /^That is all/);
  await send('[drop]');
  await done();
  assert.match(await page.evaluate(() => window.heard.at(-1)), /broke off/);
});

add('copy: the answer and the code', 'mock', async ({ page, context, send, done, answers }) => {
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  await send('[showcase]');
  await done();
  const clipboard = () => page.evaluate(() => navigator.clipboard.readText());
  await answers.locator('.copy-code').click();
  await answers.locator('.copy-code', { hasText: 'Copied' }).waitFor();
  assert.match(await clipboard(), /^\/\/\/ The largest[^]*phone\n}$/);
  await answers.locator('[data-action=copy]').click();
  assert.match(await clipboard(), /^# A short tour/);
});

add('copy works without the clipboard API, as over plain HTTP', 'mock', async ({ page, context, send, done, answers }) => {
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  await send('Hello');
  await done();
  await page.evaluate(() => (navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))));
  await answers.locator('[data-action=copy]').click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'You said: Hello');
});

for (const theme of ['light', 'dark']) {
  for (const [width, height] of [[1280, 800], [360, 740]]) {
    const name = `${theme}-${width}`;
    add(`axe finds nothing and nothing overflows: ${name}`, 'mock', async ({ page, send, done, axe, answers, shot }) => {
      await shot(`${name}-empty`);
      assert.deepEqual(await axe(), []);
      await send('[showcase]');
      await page.waitForTimeout(150);
      await shot(`${name}-streaming`);
      await done();
      await answers.locator('summary').click();
      assert.deepEqual(await axe(), []);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.equal(wide, 0, 'the page scrolls sideways');
      const log = await page.locator('#log').evaluate((element) => element.scrollWidth - element.clientWidth);
      assert.equal(log, 0, 'the transcript scrolls sideways');
      await page.locator('#log').evaluate((element) => (element.scrollTop = 0));
      await shot(`${name}-top`);
      await page.locator('#log').evaluate((element) => (element.scrollTop = element.scrollHeight));
      await shot(`${name}-end`);
      await send('[drop]');
      await done();
      await page.getByRole('button', { name: 'Edit' }).last().click();
      await shot(`${name}-edit-and-error`);
      assert.deepEqual(await axe(), []);
      if (width < 800) {
        await page.locator('#menu').click();
        await page.waitForTimeout(300);
        await shot(`${name}-sidebar`);
        assert.deepEqual(await axe(), []);
        assert.equal(await page.evaluate(() => document.activeElement.id), 'new');
        await page.keyboard.press('Escape');
        assert.equal(await page.evaluate(() => document.activeElement.id), 'menu');
        await page.locator('#menu').click();
      }
      await page.getByRole('button', { name: 'Settings' }).click();
      await shot(`${name}-settings`);
      assert.deepEqual(await axe(), []);
    }, { viewport: { width, height }, colorScheme: theme, reducedMotion: 'reduce' });
  }
}
