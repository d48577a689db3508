//! Which path does what.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::{ALLOW, CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::answer::{Answers, Ask};
use crate::app::{App, Engine};
use crate::connections::Busy;
use crate::error::{ApiError, Result};
use crate::record::Record;
use crate::reply::{Writer, json_body, send};
use crate::{anthropic, guard, openai, page, responses};

/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);

const OPENAPI: &str = include_str!("openapi.json");

/// Makes what answers at a path.
type Route = fn() -> MethodRouter<Arc<App>>;

/// The endpoints that read a body, and what answers them.
const ENDPOINTS: [(&str, Route); 7] = [
    ("/v1/completions", || call(openai::completions::handle)),
    ("/v1/chat/completions", || call(openai::chat::handle)),
    ("/v1/responses", || call(responses::handle)),
    ("/v1/messages", || call(anthropic::handle)),
    ("/v1/messages/count_tokens", || call(anthropic::count)),
    ("/tokenize", || call(openai::tokens::tokenize)),
    ("/detokenize", || call(openai::tokens::detokenize)),
];

/// Paths of the endpoints that read a body, for whoever tries them all.
pub fn endpoints() -> [&'static str; ENDPOINTS.len()] {
    ENDPOINTS.map(|(path, _)| path)
}

/// All routes, behind the guard.
pub fn router(app: Arc<App>) -> Router {
    let routes = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(([(CONTENT_TYPE, "application/json")], OPENAPI)))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model));
    let add = |routes: Router<_>, (path, route): (&str, Route)| routes.route(path, route());
    ENDPOINTS
        .into_iter()
        .fold(routes, add)
        .fallback(other)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard::guard))
        .with_state(app)
}

/// Bytes of a body that are read whatever else is going on.
const SMALL_BODY: usize = 64 << 10;

/// What a body asks for: generations, the writer of their answers, and whether as a stream.
pub type Asked<W> = (Vec<Ask>, W, bool);

/// A request to one of the endpoints that read a body.
pub struct Call {
    app: Arc<App>,
    engine: Arc<Engine>,
    record: Arc<Record>,
    body: Body,
    busy: Option<Arc<Busy>>,
}

impl Call {
    fn new(app: Arc<App>, request: Request) -> Result<Self> {
        let engine = Arc::clone(app.engine()?);
        let (parts, body) = request.into_parts();
        let record = parts.extensions.get::<Arc<Record>>().cloned();
        let record = record.ok_or_else(|| ApiError::internal("the request has no record"))?;
        let coded = parts
            .headers
            .get(CONTENT_ENCODING)
            .filter(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"));
        if let Some(coding) = coded {
            let message = format!("content-encoding: expected none, found {coding:?}");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let busy = parts.extensions.get::<Arc<Busy>>().cloned();
        Ok(Call { app, engine, record, body, busy })
    }

    /// Receives the body and reads it with `read`, which may take its time over long texts, away from the
    /// threads that serve connections.
    pub async fn prepare<T: Send + 'static>(
        &mut self,
        read: fn(&Engine, &[u8]) -> Result<T>,
    ) -> Result<T> {
        let (engine, body) = (Arc::clone(&self.engine), std::mem::take(&mut self.body));
        let (body, turn) = self.app.receive(body).await?;
        if let Some(busy) = &self.busy {
            busy.is_whole();
        }
        let task = tokio::task::spawn_blocking(move || {
            // The body is in memory until it was read, also if the client has left by then.
            let _turn = turn;
            read(&engine, &body)
        });
        task.await.map_err(|_| ApiError::internal("reading the request failed"))?
    }

    /// Starts what the body asks for, as `read` understands it, and sends the answers.
    pub async fn answer<W: Writer>(
        mut self,
        read: fn(&Engine, &[u8]) -> Result<Asked<W>>,
    ) -> Result<Response> {
        let (asks, writer, streamed) = self.prepare(read).await?;
        let answers = Answers::start(&self.app, &self.engine, &self.record, asks)?;
        send(answers, writer, streamed).await
    }
}

impl App {
    /// A body, and the turn of a large one: only so many of them are in memory at once.
    async fn receive(&self, body: Body) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>)> {
        let limit = self.max_body;
        let too_large = || {
            let message = format!("body: expected at most {limit} bytes, found more");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        // A length that was announced is refused before anything is read.
        if body.size_hint().lower() > limit as u64 {
            return Err(too_large());
        }
        let mut body = Limited::new(body, limit);
        let (mut bytes, mut turn) = (Vec::new(), None);
        let deadline = Instant::now() + BODY_TIME;
        let late =
            |_| ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
        while let Some(frame) = timeout_at(deadline, body.frame()).await.map_err(late)? {
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => too_large(),
                false => ApiError::invalid(format!("body: {error}")),
            })?;
            let Ok(data) = frame.into_data() else { continue };
            if turn.is_none() && bytes.len() + data.len() > SMALL_BODY {
                let free = Arc::clone(&self.large_bodies).acquire_owned();
                let wait = timeout_at(deadline, free).await;
                turn = wait.ok().and_then(|turn| turn.ok());
                if turn.is_none() {
                    let message = "many large requests are being read; try again later";
                    return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message));
                }
            }
            bytes.extend_from_slice(&data);
        }
        Ok((bytes, turn))
    }
}

/// A route for POST requests that `handler` answers.
fn call<F>(handler: fn(Call) -> F) -> MethodRouter<Arc<App>>
where
    F: Future<Output = Result<Response>> + Send + 'static,
{
    post(move |State(app): State<Arc<App>>, request: Request| async move {
        let path = request.uri().path().to_owned();
        let answer = async { handler(Call::new(app, request)?).await };
        answer.await.unwrap_or_else(|error| error_response(&error, &path))
    })
}

/// An error in the shape of the API that the path belongs to.
pub fn error_response(error: &ApiError, path: &str) -> Response {
    let body = if path.starts_with("/v1/messages") { error.anthropic() } else { error.openai() };
    let mut response = (error.status, json_body(&body)).into_response();
    if error.status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

async fn health(State(app): State<Arc<App>>, uri: Uri) -> Response {
    let well = app.engine().and_then(|engine| {
        let dead = |why| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why);
        engine.service.health().map_err(dead)
    });
    match well {
        Ok(()) => json_body(&json!({"status": "ok"})),
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

async fn model(
    State(app): State<Arc<App>>,
    id: std::result::Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    // A name that is no text is nobody's.
    let id = id.map(|Path(id)| id).unwrap_or_default();
    openai::models::one(&app, &id).unwrap_or_else(|error| error_response(&error, uri.path()))
}

/// The page's files, and nothing else.
async fn other(method: Method, uri: Uri) -> Response {
    let file = page::file(uri.path());
    match (method, file) {
        (Method::GET | Method::HEAD, Some(file)) => file,
        (_, Some(_)) => ([(ALLOW, "GET,HEAD")], wrong_method(uri).await).into_response(),
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
