//! `POST /tokenize` and `POST /detokenize`: what the model makes of a text, and back.

use axum::response::Response;
use serde_core::{Serialize, Serializer};
use serde_json::{Value, json};
use text::Special;
use text::chat::{Conversation, Ending, messages};

use crate::app::Engine;
use crate::chat::openai_tools;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, token_ids};
use crate::reply::{json_body, json_text};
use crate::routes::Call;

/// Tokens of a text, or of a conversation as it is put to the model.
pub async fn tokenize(mut call: Call) -> Result<Response> {
    Ok(json_text(call.prepare(read_text).await?))
}

/// Text of tokens.
pub async fn detokenize(mut call: Call) -> Result<Response> {
    Ok(json_body(&call.prepare(read_tokens).await?))
}

/// The answer as text: of millions of tokens a [`Value`] each would take a hundred times the request.
fn read_text(engine: &Engine, body: &[u8]) -> Result<String> {
    let tokenizer = engine.card.tokenizer;
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    fields.ignore(&["add_special_tokens"]);
    let text = fields.string("prompt")?.or(fields.string("content")?);
    let tokens = match (text, fields.take("messages")) {
        (Some(text), None) => tokenizer.encode(&text, Special::Recognise),
        (None, Some(value)) => {
            let tools = fields.take("tools").map(openai_tools).transpose()?.unwrap_or_default();
            let answer = fields.boolean("add_generation_prompt")?.unwrap_or(true);
            let conversation = Conversation {
                messages: messages(value)?,
                tools: tools.into_iter().map(|tool| tool.text).collect(),
                ending: if answer { Ending::Answer } else { Ending::Closed },
                thinking: fields.boolean("enable_thinking")?.unwrap_or(true),
            };
            conversation.render(engine.card.variant)?.encode(tokenizer)
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::field("prompt", "either it or messages", "both"));
        }
        (None, None) => {
            // Another server's name for it says more than that it is missing.
            fields.ignore(&["tools", "add_generation_prompt", "enable_thinking"]);
            fields.ignore(&["return_token_strs"]);
            fields.finish()?;
            return Err(ApiError::field("prompt", "either it or messages", "neither"));
        }
    };
    let with_pieces = fields.boolean("return_token_strs")?.unwrap_or(false);
    fields.finish()?;
    let context = engine.service.bounds().context;
    let (count, ids) = (tokens.len(), list(&tokens)?);
    let mut answer = format!("{{\"count\":{count},\"max_model_len\":{context},\"tokens\":{ids}");
    if with_pieces {
        let pieces = tokens.iter().map(|&id| super::spell(tokenizer, id).0);
        answer.push_str(",\"token_strs\":");
        answer.push_str(&list(pieces)?);
    }
    answer.push('}');
    Ok(answer)
}

/// A JSON array of what comes, which is written as it comes.
fn list(items: impl IntoIterator<Item: Serialize>) -> Result<String> {
    let mut text = Vec::new();
    let written = serde_json::Serializer::new(&mut text).collect_seq(items);
    let text = written.map(|()| String::from_utf8(text));
    match text {
        Ok(Ok(text)) => Ok(text),
        _ => Err(ApiError::internal("the tokens cannot be written")),
    }
}

fn read_tokens(engine: &Engine, body: &[u8]) -> Result<Value> {
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    let tokens = token_ids(fields.require("tokens")?, "tokens")?;
    fields.finish()?;
    let vocab = engine.card.tokenizer.vocabulary().rows();
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
        return Err(ApiError::field("tokens", &format!("token ids below {vocab}"), id));
    }
    let text = engine.card.tokenizer.decode(&tokens, false);
    Ok(json!({"prompt": text, "content": text}))
}
