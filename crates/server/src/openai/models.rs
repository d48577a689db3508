//! `GET /v1/models` and `GET /v1/models/{id}`.

use axum::response::Response;
use serde_json::{Value, json};

use crate::app::{App, Engine};
use crate::error::Result;
use crate::reply::json_body;

/// The list, of one.
pub fn list(app: &App) -> Result<Response> {
    let model = object(app.engine()?);
    Ok(json_body(&json!({"object": "list", "data": [model]})))
}

/// The one with this name.
pub fn one(app: &App, name: &str) -> Result<Response> {
    let engine = app.engine()?;
    engine.check_model(Some(name))?;
    Ok(json_body(&object(engine)))
}

fn object(engine: &Engine) -> Value {
    let context = engine.service.bounds().context;
    json!({
        "id": engine.card.id,
        "object": "model",
        "created": engine.created,
        "owned_by": "kipp",
        "max_model_len": context,
        "meta": {"n_vocab": engine.service.bounds().vocab, "n_ctx": context},
    })
}
