//! What every request passes first: the log line, the origin of web pages, the key.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, AUTHORIZATION, HOST, ORIGIN, VARY,
    WWW_AUTHENTICATE,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use crate::app::App;
use crate::connections::Busy;
use crate::error::ApiError;
use crate::page;
use crate::record::{Record, Recorded};
use crate::routes::error_response;

/// See the module.
pub async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let record = Record::new(request.method().as_str(), request.uri().path());
    let busy = request.extensions().get::<Arc<Busy>>().cloned();
    request.extensions_mut().insert(Arc::clone(&record));
    let origin = request.headers().get(ORIGIN).cloned();
    let foreign = origin.as_ref().is_some_and(|origin| !app.allows(origin, request.headers()));
    let path = request.uri().path().to_owned();
    let hosts = request.headers().get_all(HOST).iter().count();
    let mut response = if request.version() == Version::HTTP_11 && hosts != 1 {
        // A proxy and the server may otherwise read two different ones.
        let message = format!("host: expected one Host header, found {hosts}");
        error_response(&ApiError::invalid(message), &path)
    } else if foreign {
        let message = "pages of this origin may not use this server; see --cors-origin";
        error_response(&ApiError::new(StatusCode::FORBIDDEN, message), &path)
    } else if origin.is_some() && request.method() == Method::OPTIONS {
        preflight(request.headers())
    } else if !app.admits(request.headers()) && !is_open(request.method(), request.uri()) {
        let message = "expected a valid API key in `Authorization: Bearer ...` or `x-api-key: ...`";
        let error = ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(StatusCode::UNAUTHORIZED, message)
        };
        let mut response = error_response(&error, &path);
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        response
    } else {
        next.run(request).await
    };
    if let Some(origin) = origin.filter(|_| !foreign) {
        response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().append(VARY, HeaderValue::from_static("Origin"));
    }
    if let Ok(id) = HeaderValue::from_str(record.id()) {
        response.headers_mut().insert("x-request-id", id);
    }
    record.status(response.status());
    response.map(|body| Body::new(Recorded { body, _record: record, _busy: busy }))
}

/// Lets a page that is allowed send what it wants to.
fn preflight(headers: &HeaderMap) -> Response {
    let wanted = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let wanted = wanted.unwrap_or_else(|| HeaderValue::from_static("authorization, content-type"));
    let allowed = [
        (ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS")),
        (ACCESS_CONTROL_ALLOW_HEADERS, wanted),
        (ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400")),
    ];
    (StatusCode::NO_CONTENT, allowed).into_response()
}

/// What needs no key: whether the server lives, and the page, which asks for the key.
fn is_open(method: &Method, uri: &Uri) -> bool {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    reads && (uri.path() == "/health" || page::file(uri.path()).is_some())
}

impl App {
    /// Whether the headers carry one of the keys, where OpenAI's clients put it or where Anthropic's do, which may
    /// send both headers. Every key is compared in full, so that the time taken says nothing about how much of a
    /// guess was right.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(AUTHORIZATION).and_then(|value| {
            // As bytes: a key may have letters beyond ASCII.
            let (scheme, key) = value.as_bytes().split_at_checked(b"bearer ".len())?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
        });
        let given = bearer.into_iter().chain(headers.get("x-api-key").map(HeaderValue::as_bytes));
        let equal =
            given.flat_map(|given| self.api_keys.iter().map(|key| key.as_bytes().ct_eq(given)));
        self.api_keys.is_empty() || equal.fold(Choice::from(0), |any, one| any | one).into()
    }

    /// Whether a web page of this origin may use the server: pages of this machine, pages that the
    /// server itself sent, and those it was told of.
    fn allows(&self, origin: &HeaderValue, headers: &HeaderMap) -> bool {
        let Ok(origin) = origin.to_str() else { return false };
        if self.cors_origins.iter().any(|allowed| allowed == "*" || allowed == origin) {
            return true;
        }
        let Some((_, authority)) = origin.split_once("://") else { return false };
        let host = host_of(authority);
        if host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
            return true;
        }
        // A name could have been pointed here by its owner to reach what only this machine may; an
        // address cannot.
        let own = headers.get(HOST).and_then(|own| own.to_str().ok());
        let reached_by_name = !self.local || !self.api_keys.is_empty();
        own == Some(authority) && (reached_by_name || host.parse::<IpAddr>().is_ok())
    }
}

/// The host in `host:port` or `[address]:port`.
fn host_of(authority: &str) -> &str {
    match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    }
}
