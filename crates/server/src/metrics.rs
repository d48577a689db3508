//! Counters and histograms in Prometheus' text format, with vLLM's names and buckets behind `kipp_`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine::Load;
use engine::request::{Finished, Usage};

const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const NEXT_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Everything that is counted about one model.
pub struct Metrics {
    model: String,
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_tokens: Histogram,
    generated_tokens: Histogram,
    reasons: Mutex<BTreeMap<&'static str, u64>>,
}

impl Metrics {
    /// Counters at zero; token counts reach up to `context`.
    pub fn new(model: &str, context: usize) -> Self {
        let seconds = |bounds: &[f64]| Histogram::new(bounds.to_vec());
        let steps = (0..).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(power)));
        let tokens: Vec<f64> = steps.take_while(|&count| count <= context as f64).collect();
        Metrics {
            model: model.to_owned(),
            first_token: seconds(FIRST_TOKEN),
            next_token: seconds(NEXT_TOKEN),
            whole: seconds(REQUEST),
            queue: seconds(REQUEST),
            prefill: seconds(REQUEST),
            decode: seconds(REQUEST),
            prompt_tokens: Histogram::new(tokens.clone()),
            generated_tokens: Histogram::new(tokens),
            reasons: Mutex::new(BTreeMap::from([("stop", 0), ("length", 0), ("abort", 0)])),
        }
    }

    /// A request's first token came after this long.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// Another token came this long after the one before.
    pub fn next_token(&self, after: Duration) {
        self.next_token.observe(after.as_secs_f64());
    }

    /// A request ended.
    pub fn finished(&self, reason: &'static str, finished: &Finished, after: Duration) {
        self.whole.observe(after.as_secs_f64());
        self.queue.observe(finished.timings.queued.as_secs_f64());
        self.prefill.observe(finished.timings.prefill.as_secs_f64());
        self.decode.observe(finished.timings.decode.as_secs_f64());
        self.ended(if reason == "tool_calls" { "stop" } else { reason }, finished.usage);
    }

    /// A request's client left before the end; its times say nothing.
    pub fn aborted(&self, usage: Usage) {
        // Without a token it is not known whether the prompt was read.
        let prompt = if usage.generated > 0 { usage.prompt } else { 0 };
        self.ended("abort", Usage { prompt, ..usage });
    }

    fn ended(&self, reason: &'static str, usage: Usage) {
        self.prompt_tokens.observe(usage.prompt as f64);
        self.generated_tokens.observe(usage.generated as f64);
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        *reasons.entry(reason).or_default() += 1;
    }

    /// The page that Prometheus reads.
    pub fn render(&self, load: &Load) -> String {
        let mut page = Page { text: String::new(), model: escape(&self.model) };
        let usage = load.blocks_held as f64 / (load.blocks.max(1)) as f64;
        let singles = [
            ("num_requests_running", "Requests being evaluated", load.running as f64),
            ("num_requests_waiting", "Requests that wait", load.waiting as f64),
            ("kv_cache_usage_perc", "KV blocks in use; 1 is all of them", usage),
            (
                "num_preemptions_total",
                "Requests that lost their KV blocks for a while",
                load.preemptions as f64,
            ),
            (
                "prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache",
                load.prefix_queries as f64,
            ),
            (
                "prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache",
                load.prefix_hits as f64,
            ),
            (
                "spec_decode_num_draft_tokens_total",
                "Tokens that were drafted and checked",
                load.drafted as f64,
            ),
            (
                "spec_decode_num_accepted_tokens_total",
                "Drafted tokens that were right",
                load.accepted as f64,
            ),
            (
                "prompt_tokens_total",
                "Prompt tokens of requests that ended",
                self.prompt_tokens.sum(),
            ),
            (
                "generation_tokens_total",
                "Generated tokens of requests that ended",
                self.generated_tokens.sum(),
            ),
        ];
        for (name, help, value) in singles {
            // Prometheus' own rule of names.
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            page.single(name, kind, help, value);
        }
        page.head("request_success_total", "counter", "Requests by how they ended");
        for (reason, count) in self.reasons.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            page.line(
                "request_success_total",
                &format!(",finished_reason=\"{reason}\""),
                *count as f64,
            );
        }
        let histograms = [
            ("time_to_first_token_seconds", "From arrival to the first token", &self.first_token),
            ("inter_token_latency_seconds", "From one token to the next", &self.next_token),
            ("e2e_request_latency_seconds", "From arrival to the end", &self.whole),
            ("request_queue_time_seconds", "From arrival to admission", &self.queue),
            ("request_prefill_time_seconds", "From admission to the first token", &self.prefill),
            ("request_decode_time_seconds", "From the first token to the last", &self.decode),
            ("request_prompt_tokens", "Prompt tokens a request", &self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens a request", &self.generated_tokens),
        ];
        for (name, help, histogram) in histograms {
            page.histogram(name, help, histogram);
        }
        page.text
    }
}

/// Counts of values up to each bound.
struct Histogram {
    bounds: Vec<f64>,
    /// One more than bounds; not cumulative.
    counts: Vec<AtomicU64>,
    /// The bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: Vec<f64>) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0) }
    }

    fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Ordering::Relaxed))
    }
}

/// The text as it grows.
struct Page {
    text: String,
    model: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.push(format_args!("# HELP kipp_{name} {help}.\n# TYPE kipp_{name} {kind}\n"));
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let model = self.model.clone();
        self.push(format_args!("kipp_{name}{{model_name=\"{model}\"{labels}}} {value}\n"));
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let mut total = 0;
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            total += count.load(Ordering::Relaxed);
            self.line(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), total as f64);
        }
        self.line(&format!("{name}_sum"), "", histogram.sum());
        self.line(&format!("{name}_count"), "", total as f64);
    }

    fn push(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.text.write_fmt(text);
    }
}

/// A label's value as the format wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
