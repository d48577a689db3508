//! Which path does what.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde_json::json;

use crate::app::{App, Engine};
use crate::error::{ApiError, Result};
use crate::record::Record;
use crate::reply::json_body;
use crate::{anthropic, guard, openai, page, responses};

/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);

const OPENAPI: &str = include_str!("openapi.json");

/// All routes, behind the guard.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(([(CONTENT_TYPE, "application/json")], OPENAPI)))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", call(openai::completions::handle))
        .route("/v1/chat/completions", call(openai::chat::handle))
        .route("/v1/responses", call(responses::handle))
        .route("/v1/messages", call(anthropic::handle))
        .route("/v1/messages/count_tokens", call(anthropic::count))
        .route("/tokenize", call(openai::tokens::tokenize))
        .route("/detokenize", call(openai::tokens::detokenize))
        .fallback(other)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard::guard))
        .with_state(app)
}

/// A request to one of the endpoints that read a body.
pub struct Call {
    pub app: Arc<App>,
    pub engine: Arc<Engine>,
    pub record: Arc<Record>,
    body: Bytes,
}

impl Call {
    async fn receive(app: Arc<App>, request: Request) -> Result<Self> {
        let engine = Arc::clone(app.engine()?);
        let (parts, body) = request.into_parts();
        let record = parts.extensions.get::<Arc<Record>>().cloned();
        let record = record.ok_or_else(|| ApiError::internal("the request has no record"))?;
        let body = read_body(body, app.max_body).await?;
        Ok(Call { app, engine, record, body })
    }

    /// Reads the body with `read`, which may take its time over long texts, away from the threads that
    /// serve connections.
    pub async fn prepare<T: Send + 'static>(
        &self,
        read: fn(&Engine, &[u8]) -> Result<T>,
    ) -> Result<T> {
        let (engine, body) = (Arc::clone(&self.engine), self.body.clone());
        let task = tokio::task::spawn_blocking(move || read(&engine, &body));
        task.await.map_err(|_| ApiError::internal("reading the request failed"))?
    }
}

async fn read_body(body: Body, limit: usize) -> Result<Bytes> {
    let too_large = || {
        let message = format!("body: expected at most {limit} bytes, found more");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    // A length that was announced is refused before anything is read.
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let whole = tokio::time::timeout(BODY_TIME, Limited::new(body, limit).collect()).await;
    let late = |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
    match whole.map_err(late)? {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(error) => Err(ApiError::invalid(format!("body: {error}"))),
    }
}

/// A route for POST requests that `handler` answers.
fn call<F>(handler: fn(Call) -> F) -> MethodRouter<Arc<App>>
where
    F: Future<Output = Result<Response>> + Send + 'static,
{
    post(move |State(app): State<Arc<App>>, request: Request| async move {
        let path = request.uri().path().to_owned();
        let answer = async { handler(Call::receive(app, request).await?).await };
        answer.await.unwrap_or_else(|error| error_response(&error, &path))
    })
}

/// An error in the shape of the API that the path belongs to.
pub fn error_response(error: &ApiError, path: &str) -> Response {
    let body = if path.starts_with("/v1/messages") { error.anthropic() } else { error.openai() };
    (error.status, json_body(&body)).into_response()
}

async fn health(State(app): State<Arc<App>>, uri: Uri) -> Response {
    match app.engine() {
        Ok(_) => json_body(&json!({"status": "ok"})),
        Err(error) => error_response(&error, uri.path()),
    }
}

async fn metrics(State(app): State<Arc<App>>, uri: Uri) -> Response {
    match app.engine() {
        Ok(engine) => {
            let text = engine.metrics.render(&engine.service.load());
            ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        Err(error) => error_response(&error, uri.path()),
    }
}

async fn models(State(app): State<Arc<App>>, uri: Uri) -> Response {
    openai::models::list(&app).unwrap_or_else(|error| error_response(&error, uri.path()))
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Response {
    openai::models::one(&app, &id).unwrap_or_else(|error| error_response(&error, uri.path()))
}

/// The page's files, and nothing else.
async fn other(method: Method, uri: Uri) -> Response {
    let file = page::file(uri.path());
    match (method, file) {
        (Method::GET | Method::HEAD, Some(file)) => file,
        (_, Some(_)) => wrong_method(uri).await,
        (_, None) => {
            let message = format!("there is nothing at {}", uri.path());
            error_response(&ApiError::new(StatusCode::NOT_FOUND, message), uri.path())
        }
    }
}

async fn wrong_method(uri: Uri) -> Response {
    let message = format!("{} does not take this method", uri.path());
    error_response(&ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message), uri.path())
}
