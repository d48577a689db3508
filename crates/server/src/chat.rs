//! What the engine is asked for a conversation, whichever protocol it came by.

use serde_json::value::RawValue;
use serde_json::{Value, json};
use text::chat::tools as tool_texts;
use text::json::write_python;
use text::{Begin, Conversation, Ending, Message, Thinking, ToolCalls};

use crate::answer::{Ask, Splitter};
use crate::app::{Card, Engine};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements, is_string, kind, parse};
use crate::guide::{Grammar, Rules, call_grammar, json_grammar, json_or_calls_grammar};
use crate::params::Params;

/// A conversation and how it is to be answered.
pub struct Chat {
    /// What was said so far.
    pub messages: Vec<Message>,
    /// Functions on offer.
    pub tools: Vec<Tool>,
    /// Which of them must or may be called.
    pub tool_choice: ToolChoice,
    /// Whether several calls may be made in one answer.
    pub parallel_calls: bool,
    /// What the answer must look like.
    pub format: Format,
    /// Whether the answer thinks first.
    pub thinking: bool,
    /// Tokens that the thought may take.
    pub budget: Option<usize>,
    /// Whether the last message, the assistant's, is to be continued.
    pub resume: bool,
    /// How to generate.
    pub params: Params,
    /// Alternatives to list beside each token.
    pub top: usize,
}

/// A function on offer.
#[derive(Debug, Clone)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// The JSON text that enters the prompt.
    pub text: String,
}

/// Whether functions are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// They are not even mentioned.
    None,
    /// As the model sees fit.
    Auto,
    /// Some function must be called.
    Required,
    /// This one must be called.
    Named(String),
}

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// Anything.
    Text,
    /// JSON that fits a schema, and the field that gave it.
    Json(Value, String),
}

impl Format {
    /// JSON that fits the schema that stands at `at`.
    pub fn fits(schema: &RawValue, at: String) -> Result<Self> {
        match parse(schema, &at, "a JSON schema")? {
            schema @ (Value::Object(_) | Value::Bool(true)) => Ok(Format::Json(schema, at)),
            Value::Bool(false) => {
                Err(ApiError::field(&at, "a schema that something fits", "one that nothing does"))
            }
            _ => Err(ApiError::field(&at, "a JSON schema", kind(schema))),
        }
    }
}

/// How much a request wants the model to think.
#[derive(Debug, Clone, Copy, Default)]
pub struct Effort {
    /// Whether at all, if it says so.
    pub thinking: Option<bool>,
    /// Tokens at most.
    pub budget: Option<usize>,
}

impl Effort {
    /// Understands OpenAI's words.
    pub fn from_word(word: &str, field: &str) -> Result<Self> {
        let thinking = match word {
            "none" => false,
            "minimal" | "low" | "medium" | "high" | "xhigh" => true,
            other => {
                let expected = "none, minimal, low, medium, high or xhigh";
                return Err(ApiError::field(field, expected, format!("{other:?}")));
            }
        };
        Ok(Effort { thinking: Some(thinking), budget: None })
    }

    /// Whether the model thinks, and for how many tokens. A budget of nothing turns it off.
    pub fn resolve(self, card: &Card) -> Result<(bool, Option<usize>)> {
        let thinking = if self.budget == Some(0) { Some(false) } else { self.thinking };
        Ok((card.thinks(thinking)?, self.budget))
    }
}

impl Chat {
    /// A plain conversation.
    pub fn new(messages: Vec<Message>, thinking: bool, params: Params) -> Self {
        Chat {
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            format: Format::Text,
            thinking,
            budget: None,
            resume: false,
            params,
            top: 0,
        }
    }

    /// What the engine has to do for it: one ask a choice.
    pub fn asks(self, engine: &Engine) -> Result<Vec<Ask>> {
        let card = &engine.card;
        let offered = if self.tool_choice == ToolChoice::None { &[][..] } else { &self.tools };
        let conversation = Conversation {
            messages: self.messages,
            tools: offered.iter().map(|tool| tool.text.clone()).collect(),
            ending: if self.resume { Ending::Continue } else { Ending::Answer },
            thinking: self.thinking,
        };
        let prompt = conversation.render(card.variant)?;
        let inside = prompt.ends_thinking();
        let begin = match (inside, self.thinking && !self.resume) {
            (true, _) => Begin::Inside,
            (false, true) => Begin::MayThink,
            (false, false) => Begin::Answer,
        };
        let grammar = match (&self.tool_choice, &self.format) {
            (ToolChoice::Required, _) => Some(calls(offered.iter(), self.parallel_calls)),
            (ToolChoice::Named(name), _) => {
                Some(calls(offered.iter().filter(|tool| tool.name == *name), false))
            }
            (ToolChoice::Auto, Format::Json(schema, field)) if !offered.is_empty() => {
                // As without a format, the model is trusted with the arguments.
                let any = json!({"type": "object"});
                let functions = offered.iter().map(|tool| (tool.name.as_str(), any.clone()));
                let functions: Vec<_> = functions.collect();
                Some((json_or_calls_grammar(schema, &functions), field.clone()))
            }
            (_, Format::Json(schema, field)) => Some((json_grammar(schema), field.clone())),
            (_, Format::Text) => None,
        };
        if let (true, Some((_, field))) = (self.resume, &grammar) {
            let expected = "an answer from its beginning";
            return Err(ApiError::field(field, expected, "one to be continued"));
        }
        let compile = |(lark, field): (String, String)| {
            engine.grammars.compile(lark, &field).map(|matcher| Grammar { matcher, field })
        };
        let rules = Rules {
            grammar: grammar.map(compile).transpose()?,
            budget: self.budget,
            one_call: !self.parallel_calls && !offered.is_empty(),
        };
        let splitter = Splitter {
            thinking: Some(Thinking::new(begin)),
            calls: (!offered.is_empty()).then(ToolCalls::default),
            one_call: rules.one_call,
            called: false,
        };
        let mut params = self.params;
        if rules.grammar.is_some() || rules.one_call {
            // Nothing may follow what was asked for, also where the model's own end is ignored.
            params.stop_tokens.extend(&card.stops);
        }
        let ids = prompt.encode(card.tokenizer);
        if params.choices > 1 {
            engine.check_prompt(ids.len())?;
        }
        let ask = |choice| Ask {
            choice,
            prompt: ids.clone(),
            params: params.clone(),
            top: self.top,
            score_prompt: false,
            rules: rules.clone(),
            begin,
            splitter: splitter.clone(),
        };
        Ok((0..params.choices).map(ask).collect())
    }
}

/// The grammar of a call of one of these functions, or of several if `many` may be made.
fn calls<'a>(tools: impl Iterator<Item = &'a Tool>, many: bool) -> (String, String) {
    let functions: Vec<_> =
        tools.map(|tool| (tool.name.as_str(), tool.parameters.clone())).collect();
    (call_grammar(&functions, many), "tools".to_owned())
}

/// Reads OpenAI's `tools`: `{"type": "function", "function": {...}}` each.
pub fn openai_tools(value: &RawValue) -> Result<Vec<Tool>> {
    let texts = tool_texts(value)?;
    let read = |((at, value), text)| {
        let mut tool = Fields::read(value, at)?;
        expect_function(&mut tool)?;
        let path = tool.path("function");
        let mut function = Fields::read(tool.require("function")?, path)?;
        tool.finish()?;
        let (name, parameters) = signature(&mut function, "parameters")?;
        Ok(Tool { name, parameters, text })
    };
    elements(value, "tools")?.zip(texts).map(read).collect()
}

/// Reads a function whose members stand beside its type, the schema of its arguments in `schema`. What
/// enters the prompt is the form that the models were trained on.
pub fn flat_tool(mut function: Fields<'_>, schema: &str) -> Result<Tool> {
    let member = |name: &str, value: Option<&RawValue>| {
        value.map(|value| format!("\"{name}\": {}", value.get()))
    };
    let members = [("name", "name"), ("description", "description"), (schema, "parameters")]
        .map(|(from, to)| member(to, function.get(from)));
    let members: Vec<String> = members.into_iter().flatten().collect();
    let whole = format!("{{\"type\": \"function\", \"function\": {{{}}}}}", members.join(", "));
    let mut text = String::new();
    write_python(text::json::strict(&whole)?, &mut text)?;
    let (name, parameters) = signature(&mut function, schema)?;
    function.string("description")?;
    function.finish()?;
    Ok(Tool { name, parameters, text })
}

/// Reads OpenAI's `tool_choice`. The name of a function stands in the member `within` of the choice, if there is one.
pub fn openai_choice(fields: &mut Fields<'_>, within: Option<&str>) -> Result<ToolChoice> {
    let Some(value) = fields.take("tool_choice") else { return Ok(ToolChoice::Auto) };
    if is_string(value) {
        return match parse::<String>(value, "tool_choice", "a string")?.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            other => {
                let expected = "none, auto, required or a function";
                Err(ApiError::field("tool_choice", expected, format!("{other:?}")))
            }
        };
    }
    let mut choice = Fields::read(value, "tool_choice".into())?;
    expect_function(&mut choice)?;
    let mut function = inner(choice, within)?;
    let at = function.path("name");
    let name = parse(function.require("name")?, &at, "a name")?;
    function.finish()?;
    Ok(ToolChoice::Named(name))
}

/// Reads OpenAI's format of an answer, the member `name`. A schema stands in the member `within` of the format, if
/// there is one.
pub fn openai_format(fields: &mut Fields<'_>, name: &str, within: Option<&str>) -> Result<Format> {
    let at = fields.path(name);
    let Some(mut format) = fields.object(name)? else { return Ok(Format::Text) };
    let kind_at = format.path("type");
    match format.string("type")?.as_deref() {
        Some("text") => format.finish().map(|()| Format::Text),
        Some("json_object") => {
            format.finish().map(|()| Format::Json(json!({"type": "object"}), at))
        }
        Some("json_schema") => {
            let mut format = inner(format, within)?;
            format.ignore(&["name", "description", "strict"]);
            let at = format.path("schema");
            let schema = format.require("schema")?;
            format.finish()?;
            Format::fits(schema, at)
        }
        other => {
            let found = other.unwrap_or("nothing");
            Err(ApiError::field(&kind_at, "text, json_object or json_schema", found))
        }
    }
}

/// The object in the member `within` of another, which has nothing else to say, or that other itself.
fn inner<'a>(mut outer: Fields<'a>, within: Option<&str>) -> Result<Fields<'a>> {
    let Some(name) = within else { return Ok(outer) };
    let at = outer.path(name);
    let inner = Fields::read(outer.require(name)?, at)?;
    outer.finish()?;
    Ok(inner)
}

/// Refuses tools that are not functions.
pub fn expect_function(tool: &mut Fields<'_>) -> Result<()> {
    let path = tool.path("type");
    match tool.string("type")?.as_deref() {
        Some("function") => Ok(()),
        Some(other) => Err(ApiError::field(&path, "\"function\"", format!("{other:?}"))),
        None => Err(ApiError::field(&path, "\"function\"", "nothing")),
    }
}

/// Reads a function's name and the schema of its arguments, which stands in `schema`.
pub fn signature(function: &mut Fields<'_>, schema: &str) -> Result<(String, Value)> {
    let path = function.path("name");
    let name = function.string("name")?.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::field(&path, "a name", "nothing"))?;
    let path = function.path(schema);
    match function.value(schema)? {
        None => Ok((name, json!({"type": "object"}))),
        Some(parameters @ Value::Object(_)) => Ok((name, parameters)),
        Some(_) => Err(ApiError::field(&path, "a JSON schema", "no object")),
    }
}

/// Refuses a choice that the tools cannot meet.
pub fn check_choice(choice: &ToolChoice, tools: &[Tool]) -> Result<()> {
    let found = match choice {
        ToolChoice::Required if tools.is_empty() => "required without tools".to_owned(),
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
            format!("the unknown name {name:?}")
        }
        _ => return Ok(()),
    };
    Err(ApiError::field("tool_choice", "a choice among the tools", found))
}
