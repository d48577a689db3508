// Answers for the mock: one that shows all that Markdown may become, one that tries to run something.

export const SHOWCASE = `# A short tour

A paragraph with **bold words**, *emphasis*, ~~second thoughts~~, \`inline code\`, a [link](https://example.org/) and a formula $E = mc^2$.

## Steps

1. **Read** the weights.
   - They are mapped, not copied.
   - A block holds 32 of them.
2. Multiply, then add.
3. Go on until the model stops.

> What is well put is half understood.
>
> - said someone

### Code

\`\`\`rust
/// The largest of a row, and where it stands.
fn arg_max(row: &[f32]) -> Option<(usize, f32)> {
    row.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1)) // a long line that has to scroll on a phone
}
\`\`\`

| scheme | bits | note |
|:-------|-----:|:----:|
| bf16   |   16 | as published |
| q8_0   |  8.5 | blocks of 32 |
| q4_0   |  4.5 | blocks of 32 |

\\[
\\mathrm{softmax}(x)_i = \\frac{e^{x_i}}{\\sum_j e^{x_j}}
\\]

---

That is all: 2 * 3 = 6, snake_case_stays, and 5 < 7 & 8 > 6.`;

export const HOSTILE = `<script>window.hacked = 1</script>

<img src="x" onerror="window.hacked = 1">

[press me](javascript:window.hacked=1) [and me](data:text/html,<script>window.hacked=1</script>)
![picture](https://example.org/tracker.png) <javascript:window.hacked=1>
<a href="javascript:window.hacked=1">x</a> <svg onload="window.hacked=1"> &lt;b&gt;

\`\`\`html"><script>window.hacked=1</script>
<script>window.hacked = 1</script>
\`\`\`

| <iframe src="javascript:window.hacked=1"> | b |
|--|--|
| <style>body { display: none }</style> | <meta http-equiv="refresh" content="0; url=https://example.org"> |

End.`;
