//! `kipp chat`: a conversation on the terminal. Every turn is a whole prompt; what the one before has left in
//! the engine's prefix cache is not evaluated again.

mod answer;
mod lines;

use std::fs;
use std::io::{self, BufRead, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use anyhow::{Context, Result, bail};
use engine::{Engine, Event, FinishReason, Request, SamplingParams, Settings};
use model::{Checkpoint, Variant};
use rustyline::DefaultEditor;
use rustyline::config::Configurer;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};
use text::chat::ToolCall;
use text::{Begin, Conversation, Message, Role, Tokenizer};

use crate::interrupt;
use crate::options::{ModelOptions, tokenizer_of};
use crate::output::{check_target, complain, print, write_file, wrong_usage};
use crate::speculation::SpeculationOptions;
use crate::store;

use answer::Answer;
use lines::read_message;

const HELP: &str = "\
/system TEXT     instructions for the model; without TEXT none
/set NAME VALUE  temperature, top_p, top_k, min_p, seed, max_tokens or think
/show            settings and size of the conversation
/clear           a new conversation
/save FILE       the conversation as JSON, as OpenAI's messages
/load FILE       such a conversation
/bye             the end, also Ctrl-D
A line that ends with \\ is continued; \"\"\" begins and ends a text of several lines.
Ctrl-C stops the answer.
";

/// Talks with the model.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    speculation: SpeculationOptions,
    /// Instructions for the model
    #[arg(long)]
    system: Option<String>,
    /// Answer without thinking first, where the model leaves a choice
    #[arg(long)]
    no_think: bool,
    /// Tokens of an answer at most
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true, allow_negative_numbers = true)]
    max_tokens: usize,
    /// 0 always takes the most probable token; what the publisher recommends if left out
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Makes a conversation repeatable; random if left out
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let model = args.model.open()?;
    let checkpoint = model.checkpoint().context("the model is of no registered checkpoint")?;
    if checkpoint.variant == Variant::Base {
        bail!("{} is a base model: it continues texts and knows no conversation", checkpoint.id);
    }
    let tokenizer = tokenizer_of(model.spec())?;
    let context = args.model.context(&model)?;
    let backend = args.model.backend(&model, context)?;
    let settings = Settings { max_running: 1, token_budget: 512, context };
    let mut engine = Engine::new(backend, tokenizer.vocabulary(), settings);
    if let Some(speculation) = args.speculation.speculation(&args.model, &model, context)? {
        engine.speculate(speculation);
    }
    let mut chat = Chat {
        engine,
        tokenizer,
        checkpoint,
        messages: Vec::new(),
        thinking: !args.no_think,
        max_tokens: args.max_tokens,
        params: SamplingParams::default(),
        interrupted: interrupt::flag()?,
        terminal: io::stdout().is_terminal(),
    };
    chat.params = chat.recommended();
    chat.params.seed = args.seed.unwrap_or_else(engine::philox::random_seed);
    if let Some(temperature) = args.temperature {
        chat.params.temperature = temperature;
        chat.params.check().map_err(|why| wrong_usage(format!("--{why}")))?;
    }
    chat.instruct(args.system.as_deref().unwrap_or_default());
    if io::stdin().is_terminal() && chat.terminal { chat.talk() } else { chat.read_lines() }
}

struct Chat {
    engine: Engine,
    tokenizer: &'static Tokenizer,
    checkpoint: &'static Checkpoint,
    messages: Vec<Message>,
    thinking: bool,
    max_tokens: usize,
    params: SamplingParams,
    interrupted: Arc<AtomicBool>,
    /// Whether thoughts can be dimmed.
    terminal: bool,
}

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Go,
    Bye,
}

impl Chat {
    /// What the checkpoint's publisher recommends, with the seed kept.
    fn recommended(&self) -> SamplingParams {
        let recommended = SamplingParams::recommended(self.checkpoint.variant, self.thinking);
        SamplingParams { seed: self.params.seed, ..recommended }
    }

    /// With a line editor and a history.
    fn talk(&mut self) -> Result<()> {
        let mut editor = DefaultEditor::new()?;
        editor.set_auto_add_history(true);
        let history = store::folder().ok().and_then(|f| Some(f.parent()?.join("chat-history")));
        if let Some(history) = &history {
            // There is none before the first conversation.
            let _ = editor.load_history(history);
        }
        complain(&format!("{}; /help says more", self.checkpoint.id));
        let mut line = |prompt: &str| match editor.readline(prompt) {
            Err(ReadlineError::Eof) => Ok(None),
            line => line.map(Some),
        };
        loop {
            match read_message(&mut line) {
                Ok(Some(text)) if self.obey(&text)? == Next::Go => {}
                Ok(_) => break,
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    complain("expected UTF-8, found other bytes; the line is not sent");
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(history) = history.filter(|h| h.parent().is_some_and(Path::exists)) {
            editor.save_history(&history)?;
        }
        Ok(())
    }

    /// From a pipe: no prompts, no colours.
    fn read_lines(&mut self) -> Result<()> {
        self.terminal = false;
        let mut lines = io::stdin().lock().lines();
        while let Some(text) = read_message(|_| lines.next().transpose())? {
            if self.obey(&text)? == Next::Bye {
                break;
            }
        }
        Ok(())
    }

    /// Answers a message or carries out a command. What goes wrong is said, and the conversation goes on.
    fn obey(&mut self, text: &str) -> Result<Next> {
        let text = text.trim();
        let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        let done = match command {
            "" => Ok(()),
            "/bye" | "/exit" | "/quit" => return Ok(Next::Bye),
            "/help" | "/?" => print(HELP),
            "/clear" => {
                self.messages.retain(|message| message.role == Role::System);
                Ok(())
            }
            "/system" => {
                self.instruct(rest);
                Ok(())
            }
            "/set" => self.set(rest),
            "/show" => self.show(),
            "/save" | "/load" if rest.is_empty() => {
                complain(&format!("{command}: expected the name of a file, found none"));
                Ok(())
            }
            "/save" => {
                check_target(command, Path::new(rest)).and_then(|()| self.save(Path::new(rest)))
            }
            "/load" => self.load(Path::new(rest)),
            command if command.starts_with('/') => {
                complain(&format!("{command}: no such command; /help lists them"));
                Ok(())
            }
            _ => self.answer(text),
        };
        match done {
            Err(error) if crate::output::is_closed_pipe(&error) => Err(error),
            Err(error) => {
                complain(&format!("{error:#}"));
                Ok(Next::Go)
            }
            Ok(()) => Ok(Next::Go),
        }
    }

    /// Puts the instructions first; an empty text takes them away.
    fn instruct(&mut self, text: &str) {
        self.messages.retain(|message| message.role != Role::System);
        if !text.is_empty() {
            self.messages.insert(0, Message::new(Role::System, text));
        }
    }

    fn set(&mut self, text: &str) -> Result<()> {
        let (name, value) = text
            .split_once(char::is_whitespace)
            .context("/set: expected NAME VALUE, found less; /help lists them")?;
        let value = value.trim();
        let number = || value.parse::<f32>().with_context(|| format!("{name}: expected a number"));
        let whole =
            || value.parse::<u64>().with_context(|| format!("{name}: expected a whole number"));
        let mut params = self.params.clone();
        match name {
            "temperature" => params.temperature = number()?,
            "top_p" => params.top_p = number()?,
            "min_p" => params.min_p = number()?,
            "top_k" => params.top_k = u32::try_from(whole()?).context("top_k")?,
            "seed" => params.seed = whole()?,
            "max_tokens" => self.max_tokens = usize::try_from(whole()?).context("max_tokens")?,
            "think" => {
                self.thinking = match value {
                    "on" | "true" | "1" => true,
                    "off" | "false" | "0" => false,
                    other => bail!("think: expected on or off, found {other}"),
                };
                params = self.recommended();
            }
            other => bail!("{other}: no such setting; /help lists them"),
        }
        params.check().map_err(anyhow::Error::msg)?;
        self.params = params;
        Ok(())
    }

    fn show(&self) -> Result<()> {
        let p = &self.params;
        let tokens = self.prompt()?.len();
        print(&format!(
            "model {}\ntemperature {}\ntop_p {}\ntop_k {}\nmin_p {}\nseed {}\nthink {}\n\
             messages {}, {tokens} of {} tokens\n",
            self.checkpoint.id,
            p.temperature,
            p.top_p,
            p.top_k,
            p.min_p,
            p.seed,
            if self.thinking { "on" } else { "off" },
            self.messages.len(),
            self.engine.context(),
        ))
    }

    fn save(&self, path: &Path) -> Result<()> {
        let message = |message: &Message| {
            let role = match message.role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
                Role::Tool => "tool",
            };
            let mut value = json!({"role": role, "content": message.content});
            if let Some(reasoning) = &message.reasoning {
                value["reasoning_content"] = reasoning.as_str().into();
            }
            // A conversation that was loaded may have them.
            if !message.tool_calls.is_empty() {
                let call = |call: &ToolCall| {
                    let function = json!({"name": call.name, "arguments": call.arguments});
                    json!({"type": "function", "function": function})
                };
                value["tool_calls"] = message.tool_calls.iter().map(call).collect();
            }
            value
        };
        let messages: Vec<Value> = self.messages.iter().map(message).collect();
        let text = serde_json::to_string_pretty(&json!({"messages": messages}))?;
        write_file(path, &(text + "\n"))
    }

    fn load(&mut self, path: &Path) -> Result<()> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let conversation = Conversation::parse(&text);
        self.messages = conversation.with_context(|| path.display().to_string())?.messages;
        Ok(())
    }

    fn conversation(&self) -> Conversation {
        Conversation { thinking: self.thinking, ..Conversation::new(self.messages.clone()) }
    }

    fn prompt(&self) -> Result<Vec<u32>> {
        if self.messages.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.conversation().render(self.checkpoint.variant)?.encode(self.tokenizer))
    }

    /// Writes the model's answer to a message and adds both to the conversation.
    fn answer(&mut self, text: &str) -> Result<()> {
        self.messages.push(Message::new(Role::User, text));
        match self.generate() {
            Ok(message) => self.messages.push(message),
            Err(error) => {
                // The conversation stays as it was before the message.
                self.messages.pop();
                return Err(error);
            }
        }
        print("\n")
    }

    fn generate(&mut self) -> Result<Message> {
        let prompt = self.conversation().render(self.checkpoint.variant)?;
        let begin = match (prompt.ends_thinking(), self.thinking) {
            (true, _) => Begin::Inside,
            (false, true) => Begin::MayThink,
            (false, false) => Begin::Answer,
        };
        let mut answer = Answer::new(begin, self.terminal);
        let (sink, events) = sync_channel(64);
        self.interrupted.store(false, Ordering::Relaxed);
        let id = self.engine.submit(Request {
            max_tokens: self.max_tokens,
            sampling: self.params.clone(),
            stop_tokens: self.checkpoint.stops(),
            ..Request::new(prompt.encode(self.tokenizer), Box::new(sink))
        })?;
        let reason = 'answer: loop {
            if self.interrupted.load(Ordering::Relaxed) {
                self.engine.cancel(id);
            }
            self.engine.step()?;
            for event in events.try_iter() {
                match event {
                    Event::Prompt(_) => {}
                    Event::Token(token) => answer.grow(&token.text, false)?,
                    Event::Finished(finished) => {
                        answer.grow(&finished.text, true)?;
                        break 'answer finished.reason;
                    }
                }
            }
        };
        self.interrupted.store(false, Ordering::Relaxed);
        match reason {
            FinishReason::Error(why) => bail!(why),
            FinishReason::Length => complain("\n[cut off: max_tokens or the context is reached]"),
            _ => {}
        }
        Ok(answer.message())
    }
}
