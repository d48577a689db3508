//! `POST /v1/completions`.

use axum::response::Response;
use engine::Choice;
use serde_json::{Map, Value, json};
use text::{Begin, Decoder, Special, Tokenizer};

use super::{Head, finish_reason, finite, spell, timings};
use crate::answer::{Ask, EndOfAnswer, Splitter, Step, Whole};
use crate::app::Engine;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements, is_string, kind, parse, token_ids};
use crate::guide::Rules;
use crate::params::{MAX_TOP, Params, stream_options};
use crate::reply::{Events, Writer};
use crate::routes::{Asked, Call};

/// Tokens to generate where a request does not say: OpenAI's own default for this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Prompts of one request.
const MAX_PROMPTS: usize = 64;
/// Answers of one request.
const MAX_ANSWERS: usize = 128;

/// What an answer calls itself, whole or in chunks.
const OBJECT: &str = "text_completion";

/// Answers the request.
pub async fn handle(call: Call) -> Result<Response> {
    call.answer(read).await
}

/// Reads the request.
fn read(engine: &Engine, body: &[u8]) -> Result<Asked<Completions>> {
    let card = &engine.card;
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    let prompts = prompts(&mut fields, card.tokenizer)?;
    let mut params = Params::read(&mut fields, card, card.sampling(false), 0)?;
    params.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
    let (streamed, include_usage) = stream_options(&mut fields)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let top = fields.whole("logprobs", 0)?;
    if top.is_some_and(|top| top > MAX_TOP) {
        return Err(ApiError::field("logprobs", &format!("at most {MAX_TOP}"), top.unwrap_or(0)));
    }
    let best_of = fields.whole("best_of", 1)?;
    if best_of.is_some_and(|best_of| best_of != params.choices) {
        return Err(ApiError::field("best_of", "the same as n", best_of.unwrap_or(0)));
    }
    if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "nothing: infilling is not supported", "a text"));
    }
    fields.finish()?;
    let score_prompt = echo && top.is_some();
    prompts.iter().try_for_each(|prompt| engine.check_prompt(prompt.ids.len()))?;
    let choices = params.choices;
    if prompts.len() * choices > MAX_ANSWERS {
        let most = format!("at most {MAX_ANSWERS} answers to all prompts together");
        return Err(ApiError::field("n", &most, prompts.len() * choices));
    }
    let ask = |prompt: &Prompt, choice| Ask {
        choice,
        prompt: prompt.ids.clone(),
        params: params.clone(),
        top: top.unwrap_or(0),
        score_prompt,
        rules: Rules::default(),
        begin: Begin::Answer,
        splitter: Splitter::default(),
    };
    let asks: Vec<Ask> = prompts
        .iter()
        .flat_map(|prompt| (0..choices).map(move |choice| (prompt, choice)))
        .map(|(prompt, choice)| ask(prompt, choice))
        .collect();
    let logs = prompts.iter().flat_map(|prompt| {
        let echoed = echo.then(|| prompt.clone());
        let tokenizer = card.tokenizer;
        (0..choices).map(move |_| Log::new(tokenizer, echoed.clone(), top.is_some()))
    });
    let writer = Completions {
        head: Head::new("cmpl-", &card.id, include_usage),
        logs: logs.collect(),
        ends: Vec::new(),
    };
    Ok((asks, writer, streamed))
}

/// A prompt, as text and as tokens.
#[derive(Clone)]
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

impl Prompt {
    fn from_text(text: String, tokenizer: &Tokenizer) -> Self {
        let ids = tokenizer.encode(&text, Special::Recognise);
        Prompt { text, ids }
    }

    fn from_ids(ids: Vec<u32>, tokenizer: &Tokenizer) -> Self {
        let text = tokenizer.decode(&ids, false);
        Prompt { text, ids }
    }
}

/// Reads `prompt`: a text, token ids, or a list of either.
fn prompts(fields: &mut Fields<'_>, tokenizer: &Tokenizer) -> Result<Vec<Prompt>> {
    let expected = "a text, token ids, or a list of either";
    let value = fields.require("prompt")?;
    if is_string(value) {
        return Ok(vec![Prompt::from_text(parse(value, "prompt", expected)?, tokenizer)]);
    }
    let items =
        elements(value, "prompt").map_err(|_| ApiError::field("prompt", expected, kind(value)))?;
    let mut items = items.peekable();
    let count = items.len();
    match items.peek() {
        None => return Err(ApiError::field("prompt", "at least one token", "an empty array")),
        Some((_, first)) if !is_string(first) && !first.get().starts_with('[') => {
            return Ok(vec![Prompt::from_ids(token_ids(value, "prompt")?, tokenizer)]);
        }
        Some(_) if count > MAX_PROMPTS => {
            let most = format!("at most {MAX_PROMPTS} prompts");
            return Err(ApiError::field("prompt", &most, count));
        }
        Some(_) => {}
    }
    let prompt = |(at, item): (String, _)| {
        if is_string(item) {
            Ok(Prompt::from_text(parse(item, &at, "a text")?, tokenizer))
        } else {
            Ok(Prompt::from_ids(token_ids(item, &at)?, tokenizer))
        }
    };
    items.map(prompt).collect()
}

/// Gathers what is told about the tokens of one answer.
struct Log {
    tokenizer: &'static Tokenizer,
    /// The prompt, until it was echoed.
    echo: Option<Prompt>,
    /// Whether logprobs are wanted.
    wanted: bool,
    decoder: Decoder,
    /// Characters so far.
    offset: usize,
}

impl Log {
    fn new(tokenizer: &'static Tokenizer, echo: Option<Prompt>, wanted: bool) -> Self {
        let decoder = Decoder::new(tokenizer.vocabulary(), true);
        Log { tokenizer, echo, wanted, decoder, offset: 0 }
    }

    /// The text and the logprobs of what comes: the echo before everything else.
    fn take(&mut self, scores: &[Choice], tokens: &[Choice], text: &str) -> (String, Value) {
        let mut logprobs = Logprobs::default();
        let mut whole = String::new();
        if let Some(prompt) = self.echo.take() {
            whole.push_str(&prompt.text);
            // An echo shows special tokens, an answer hides them.
            let shown = Decoder::new(self.tokenizer.vocabulary(), false);
            let answer = std::mem::replace(&mut self.decoder, shown);
            let first = prompt.ids.first().map(|&id| (id, None));
            let scored = scores.iter().map(|choice| (choice.token, Some(choice)));
            first.into_iter().chain(scored).for_each(|(id, choice)| {
                self.log(id, choice, &mut logprobs);
            });
            self.decoder = answer;
        }
        whole.push_str(text);
        tokens.iter().for_each(|choice| self.log(choice.token, Some(choice), &mut logprobs));
        let value = if self.wanted { logprobs.value() } else { Value::Null };
        (whole, value)
    }

    fn log(&mut self, id: u32, choice: Option<&Choice>, logprobs: &mut Logprobs) {
        if !self.wanted {
            return;
        }
        logprobs.offsets.push(self.offset);
        logprobs.tokens.push(name(self.tokenizer, id));
        logprobs.logprobs.push(choice.map(|choice| finite(choice.logprob)));
        logprobs.top.push(choice.map(|choice| {
            let entry = |&(id, logprob): &(u32, f32)| {
                (name(self.tokenizer, id), Value::from(finite(logprob)))
            };
            // The token itself is always among them, also as one more than was asked for.
            let itself = (choice.token, choice.logprob);
            choice.top.iter().chain([&itself]).map(entry).collect::<Map<String, Value>>()
        }));
        let mut text = String::new();
        self.decoder.push(id, &mut text);
        self.offset += text.chars().count();
    }
}

/// A token's name: its text, or its bytes where they are no whole characters.
fn name(tokenizer: &Tokenizer, id: u32) -> String {
    let (text, bytes) = spell(tokenizer, id);
    if text.as_bytes() == bytes {
        return text;
    }
    let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{escaped}")
}

#[derive(Default)]
struct Logprobs {
    tokens: Vec<String>,
    logprobs: Vec<Option<f32>>,
    top: Vec<Option<Map<String, Value>>>,
    offsets: Vec<usize>,
}

impl Logprobs {
    fn value(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }
}

/// Writes `text_completion` objects.
struct Completions {
    head: Head,
    /// One an answer.
    logs: Vec<Log>,
    ends: Vec<EndOfAnswer>,
}

impl Completions {
    fn choice(index: usize, text: String, logprobs: Value, finish: Option<&str>) -> Value {
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish})
    }
}

impl Writer for Completions {
    fn begin(&mut self, _: &mut Events) {}

    fn step(&mut self, step: Step, events: &mut Events) {
        let log = &mut self.logs[step.index];
        // The scores of the prompt leave with the first token, or with the end if there is none.
        let scores = step.prompt.unwrap_or_default();
        if !scores.is_empty() || step.token.is_some() || step.ended.is_some() {
            let tokens: Vec<Choice> = step.token.into_iter().collect();
            let (text, logprobs) = log.take(&scores, &tokens, &step.content);
            let finish = step.ended.as_ref().map(|end| finish_reason(end.finish));
            let silent = text.is_empty() && (!log.wanted || tokens.is_empty());
            if !silent || finish.is_some() {
                let choice = Self::choice(step.index, text, logprobs, finish);
                let mut chunk = self.head.chunk(OBJECT, choice);
                if let Some(end) = &step.ended {
                    chunk["timings"] = timings(std::slice::from_ref(end));
                }
                events.data(&chunk);
            }
        }
        self.ends.extend(step.ended);
    }

    fn end(&mut self, events: &mut Events) {
        self.head.end(OBJECT, &self.ends, events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.openai());
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        let mut choices = Vec::new();
        for (index, answer) in answers.into_iter().enumerate() {
            let (text, logprobs) =
                self.logs[index].take(&answer.prompt, &answer.tokens, &answer.content);
            let finish = answer.ended.as_ref().map(|end| finish_reason(end.finish));
            choices.push(Self::choice(index, text, logprobs, finish));
            self.ends.extend(answer.ended);
        }
        self.head.whole(OBJECT, choices, &self.ends)
    }
}
