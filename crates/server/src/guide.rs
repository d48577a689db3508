//! Steers an answer token by token: bounds a thought, then holds what follows to a grammar.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::{Arc, OnceLock};

use engine::request::Constraint;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use model::{Marker, Vocabulary};
use serde_json::{Value, json};
use text::thinking::Parts;
use text::{Begin, Special, Thinking, Tokenizer};

use crate::error::{ApiError, Result};

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    vocabulary: &'static Vocabulary,
    end: u32,
    factory: OnceLock<ParserFactory>,
}

impl Grammars {
    /// Grammars over this vocabulary, whose answers end with the token `end`.
    pub fn new(vocabulary: &'static Vocabulary, end: u32) -> Self {
        Grammars { vocabulary, end, factory: OnceLock::new() }
    }

    /// A grammar in Lark's notation; JSON schemas may stand in it as `%json {...}`.
    pub fn compile(&self, lark: String, field: &str) -> Result<Matcher> {
        let invalid = |why: String| ApiError::field(field, "a schema that can be followed", why);
        if let Some(step) = multiples(&lark).find(|&step| step > MAX_MULTIPLE) {
            let why = format!("multipleOf with the digits {step}, more than {MAX_MULTIPLE}");
            return Err(invalid(why));
        }
        // Built with the first grammar: most servers never see one.
        let factory = match self.factory.get() {
            Some(factory) => factory,
            None => {
                let built = self.build().map_err(ApiError::internal)?;
                self.factory.get_or_init(|| built)
            }
        };
        let parser = factory.create_parser(TopLevelGrammar::from_lark(lark));
        let mut matcher = Matcher::new(parser);
        // A schema that refers to nothing but itself compiles and lets no answer begin.
        match matcher.compute_mask_or_eos() {
            Ok(_) => Ok(matcher),
            Err(error) => Err(invalid(reason(&error))),
        }
    }

    fn build(&self) -> std::result::Result<ParserFactory, String> {
        let rows = self.vocabulary.rows() as u32;
        let spelling = |id| match (self.vocabulary.added(id), self.vocabulary.bytes(id)) {
            // The mark tells an added token from the same letters in text.
            (Some(added), _) => [&[TokTrie::SPECIAL_TOKEN_MARKER], added.text.as_bytes()].concat(),
            (None, bytes) => bytes.unwrap_or_default().to_vec(),
        };
        let words: Vec<Vec<u8>> = (0..rows).map(spelling).collect();
        let trie = TokTrie::from(&TokRxInfo::new(rows, self.end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
        factory.quiet();
        Ok(factory)
    }
}

/// Largest digits of a `multipleOf`: each remainder is a state, and a million of them take seconds to compile.
const MAX_MULTIPLE: u64 = 100_000;

/// The digits of the numbers that a grammar's schemas want multiples of, e.g. 25 for 0.25 and for 2500.
fn multiples(lark: &str) -> impl Iterator<Item = u64> {
    lark.split("\"multipleOf\":").skip(1).map(|rest| {
        let number = rest.chars().take_while(|c| c.is_ascii_digit() || ".-".contains(*c));
        let digits: String = number.filter(char::is_ascii_digit).collect();
        match digits.trim_end_matches('0') {
            "" => 0,
            digits => digits.parse().unwrap_or(u64::MAX),
        }
    })
}

/// An answer that is one JSON value of this schema, written as the models were trained to.
pub fn json_grammar(schema: &Value) -> String {
    format!("start: %json {}\n", spaced(schema))
}

/// An answer that is a call of one of these functions (name, schema of its arguments), or several if
/// `many` may be made.
pub fn call_grammar(functions: &[(&str, Value)], many: bool) -> String {
    let start = if many { CALLS } else { "call" };
    format!("start: {start}\n{}", call_rules(functions))
}

/// An answer that is one JSON value of this schema, or calls of these functions.
pub fn json_or_calls_grammar(schema: &Value, functions: &[(&str, Value)]) -> String {
    let rules = call_rules(functions);
    format!("start: value | {CALLS}\nvalue: %json {}\n{rules}", spaced(schema))
}

/// One call or more, in Lark's notation.
const CALLS: &str = "call (\"\\n\" call)*";

/// The rules of `call`. The arguments of each function have a rule of their own, because what a schema refers to
/// with `#` is the schema itself. They are an object, also where the schema does not say so.
fn call_rules(functions: &[(&str, Value)]) -> String {
    let rule = |(number, (name, parameters)): (usize, &(&str, Value))| {
        let begin = Value::from(format!("{{\"name\": {}, \"arguments\": ", Value::from(*name)));
        let mut schema = spaced(parameters);
        schema["type"] = "object".into();
        format!(
            "function{number}: {begin} arguments{number} \"}}\"\narguments{number}: %json {schema}\n"
        )
    };
    let rules: String = functions.iter().enumerate().map(rule).collect();
    let names: Vec<String> =
        (0..functions.len()).map(|number| format!("function{number}")).collect();
    let any = names.join(" | ");
    format!("call: <tool_call> \"\\n\" ({any}) \"\\n\" </tool_call>\n{rules}")
}

/// One space behind colons and commas and no other white space: that is what the models know, and a
/// model that may write white space at will can write it for ever.
fn spaced(schema: &Value) -> Value {
    // A schema that is not an object is `true`, which asks for nothing.
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    let layout =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema.insert("x-guidance".into(), layout);
    Value::Object(schema)
}

/// What an error of the grammar's library says, without its place in the grammar's text, which nobody
/// wrote, and without the library's state.
fn reason(error: &dyn Display) -> String {
    let text = error.to_string();
    let why = text.split_once("JSON schema: ").map_or(text.as_str(), |(_, why)| why);
    if why.contains("panic: ") {
        return "the schema is beyond what can be followed".into();
    }
    let why = why.split("<state>").next().unwrap_or_default();
    // Lines of the grammar are shown with their numbers.
    let is_source = |line: &&str| {
        let number = line.split_once(" | ").map(|(number, _)| number.trim());
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    let lines = why.lines().take_while(|line| !is_source(line));
    lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// What an answer is held to.
#[derive(Clone, Default)]
pub struct Rules {
    /// What follows the thought.
    pub grammar: Option<Grammar>,
    /// Tokens that a thought may take.
    pub budget: Option<usize>,
    /// Whether the answer ends behind its first tool call.
    pub one_call: bool,
}

/// A compiled grammar that each answer takes a fresh copy of.
pub struct Grammar {
    /// Says what may come next.
    pub matcher: Matcher,
    /// The field of the request that asked for it.
    pub field: String,
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        Grammar { matcher: self.matcher.deep_clone(), field: self.field.clone() }
    }
}

/// Follows one answer and says what may come next.
///
/// Thoughts are followed as the reader of the answer will follow them, by their text: a model may write a tag
/// letter by letter.
#[derive(Clone)]
pub struct Guide {
    vocabulary: &'static Vocabulary,
    rules: Rules,
    stage: Stage,
    thinking: Thinking,
    /// Tokens of the thought so far.
    thought: usize,
    /// Tokens that come next whatever the model says.
    forced: VecDeque<u32>,
    ids: Ids,
    words: usize,
    /// All tokens but those that end an answer: a thought must go on to what was asked for.
    endless: Option<Arc<[u32]>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Start,
    Thinking,
    Answer,
    End,
}

#[derive(Clone)]
struct Ids {
    open: u32,
    close: u32,
    call_end: u32,
    end: u32,
    paragraph: Vec<u32>,
}

impl Guide {
    /// A guide for an answer that begins like this.
    pub fn new(rules: Rules, begin: Begin, tokenizer: &'static Tokenizer, end: u32) -> Self {
        let vocabulary = tokenizer.vocabulary();
        let ids = Ids {
            open: vocabulary.id(Marker::Think),
            close: vocabulary.id(Marker::ThinkEnd),
            call_end: vocabulary.id(Marker::ToolCallEnd),
            end,
            paragraph: tokenizer.encode("\n\n", Special::Literal),
        };
        let stage = match begin {
            Begin::Answer => Stage::Answer,
            Begin::MayThink => Stage::Start,
            Begin::Inside => Stage::Thinking,
        };
        let words = vocabulary.rows().div_ceil(32);
        let endless = rules.grammar.is_some().then(|| {
            let mut mask = vec![u32::MAX; words];
            for end in [vocabulary.id(Marker::ImEnd), vocabulary.id(Marker::EndOfText)] {
                mask[end as usize / 32] &= !(1 << (end % 32));
            }
            mask.into()
        });
        let thinking = Thinking::new(begin);
        let forced = VecDeque::new();
        Guide { vocabulary, rules, stage, thinking, thought: 0, forced, ids, words, endless }
    }

    /// Follows a thought over the next token.
    fn think(&mut self, token: u32) {
        self.thinking.push(&self.text(token), &mut Parts::default());
        self.stage = match (self.thinking.is_inside(), self.thinking.may_begin()) {
            (true, _) => Stage::Thinking,
            (false, true) => Stage::Start,
            (false, false) => Stage::Answer,
        };
    }

    /// What the reader sees of a token. Parts of characters become others; tags have none.
    fn text(&self, token: u32) -> Cow<'static, str> {
        match self.vocabulary.added(token) {
            Some(added) if added.special => Cow::default(),
            _ => String::from_utf8_lossy(self.vocabulary.bytes(token).unwrap_or_default()),
        }
    }

    /// What a thought before a grammar may go on with. A token that ends a spelled tag and goes on would say what
    /// the grammar has not seen; no token holds a whole tag and more.
    fn inside(&self) -> Option<Arc<[u32]>> {
        if !self.thinking.is_closing() {
            return self.endless.clone();
        }
        let mut mask = self.endless.as_ref()?.to_vec();
        for token in 0..self.vocabulary.rows() as u32 {
            if self.thinking.runs_over(&self.text(token)) {
                mask[token as usize / 32] &= !(1 << (token % 32));
            }
        }
        Some(mask.into())
    }

    fn only(&self, token: u32) -> Option<Arc<[u32]>> {
        let mut mask = vec![0; self.words];
        mask[token as usize / 32] = 1 << (token % 32);
        Some(mask.into())
    }
}

impl Constraint for Guide {
    fn mask(&mut self) -> std::result::Result<Option<Arc<[u32]>>, String> {
        if let Some(&token) = self.forced.front() {
            return Ok(self.only(token));
        }
        match (self.stage, &mut self.rules.grammar) {
            // A grammar waits for the end of a thought, so the thought has to come.
            (Stage::Start, Some(_)) => Ok(self.only(self.ids.open)),
            (Stage::Answer, Some(Grammar { matcher, .. })) => {
                let mask = matcher.compute_mask_or_eos().map_err(|error| reason(&error))?;
                let mut mask = mask.as_slice().to_vec();
                mask.resize(self.words, 0);
                Ok(Some(mask.into()))
            }
            (Stage::Thinking, Some(_)) => Ok(self.inside()),
            (Stage::End, _) => Ok(self.only(self.ids.end)),
            _ => Ok(None),
        }
    }

    fn accept(&mut self, token: u32) -> std::result::Result<(), String> {
        let forced = self.forced.pop_front().is_some();
        let before = self.stage;
        if matches!(before, Stage::Start | Stage::Thinking) {
            self.think(token);
        }
        let has_grammar = self.rules.grammar.is_some();
        match before {
            Stage::Start => {}
            Stage::Thinking if self.stage == Stage::Answer => {
                if has_grammar {
                    self.forced.extend(&self.ids.paragraph);
                }
            }
            Stage::Thinking => {
                self.thought += 1;
                if !forced && self.rules.budget.is_some_and(|budget| self.thought >= budget) {
                    self.forced.push_back(self.ids.close);
                    if !has_grammar {
                        self.forced.extend(&self.ids.paragraph);
                    }
                }
            }
            Stage::Answer if forced => {}
            Stage::Answer => {
                if let Some(Grammar { matcher, .. }) = &mut self.rules.grammar {
                    matcher.consume_token(token).map_err(|error| reason(&error))?;
                }
            }
            Stage::End => {}
        }
        if self.rules.one_call && token == self.ids.call_end && self.stage != Stage::Thinking {
            self.stage = Stage::End;
        }
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_multiples_are_told_however_many_they_are() {
        let digits = |number: &str| {
            let lark = format!("start: %json {{\"multipleOf\":{number}}}");
            multiples(&lark).collect::<Vec<_>>()
        };
        assert_eq!(digits("0.250"), [25]);
        assert_eq!(digits("2500"), [25]);
        assert_eq!(digits("0.0"), [0]);
        assert_eq!(digits("123456789012345678901"), [u64::MAX]);
    }
}
