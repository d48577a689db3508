//! Connections: bounding them, encrypting them, answering what comes by them, and closing those that are idle.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::stall::Stall;

/// How long the head of a request may take to arrive, and a connection may be idle before it.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// How long a TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long a reader may take nothing of what it is sent.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// Bytes that a request's head may take.
const MAX_HEAD: usize = 64 << 10;

/// The open connections, by number; a lower number is older.
type Open = Mutex<HashMap<u64, Arc<Connection>>>;

/// Serves each connection on a task of its own, and bounds how many there are.
pub struct Connections {
    router: Router,
    tls: Option<TlsAcceptor>,
    most: usize,
    open: Arc<Open>,
    closing: watch::Sender<bool>,
    next: u64,
}

/// One connection, as the others see it.
#[derive(Default)]
struct Connection {
    /// Requests that have arrived whole and are not answered to their end.
    requests: AtomicUsize,
    /// Requests so far that have arrived whole: a connection that was of use is kept before one that never
    /// was.
    served: AtomicU64,
    /// Whether something has come that is not the end of a whole request: a head or a body may go on.
    unread: Arc<AtomicBool>,
    close: Notify,
}

/// Held by a request until it is answered. Its connection gives way to another until the request is whole.
pub struct Busy {
    connection: Arc<Connection>,
    whole: AtomicBool,
}

impl Busy {
    /// Notes that the whole request is here.
    pub fn is_whole(&self) {
        if !self.whole.swap(true, Ordering::AcqRel) {
            self.connection.unread.store(false, Ordering::Release);
            self.connection.requests.fetch_add(1, Ordering::AcqRel);
            self.connection.served.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.whole.load(Ordering::Acquire) {
            self.connection.requests.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Connections {
    /// No connections yet, `most` at once later; they end in order when `closing` turns true.
    pub fn new(
        router: Router,
        tls: Option<TlsAcceptor>,
        most: usize,
        closing: watch::Sender<bool>,
    ) -> Self {
        Connections { router, tls, most, open: Arc::default(), closing, next: 0 }
    }

    /// Serves a stream on a task of its own, if there is or can be made room for it.
    pub fn start(&mut self, stream: TcpStream, tasks: &mut JoinSet<()>) {
        let full = self.lock().len() >= self.most;
        if full && !self.close_idle() {
            return;
        }
        // Small events must not wait for one another; if the system cannot do that, they do.
        let _ = stream.set_nodelay(true);
        self.next += 1;
        let number = self.next;
        let connection = Arc::new(Connection::default());
        self.lock().insert(number, Arc::clone(&connection));
        let (router, tls) = (self.router.clone(), self.tls.clone());
        let (open, closing) = (Arc::clone(&self.open), self.closing.subscribe());
        tasks.spawn(async move {
            let seen = Arc::clone(&connection);
            let serving = async {
                match tls {
                    None => serve(stream, router, seen, closing).await,
                    Some(tls) => {
                        let shaken = tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream));
                        if let Ok(Ok(stream)) = shaken.await {
                            serve(stream, router, seen, closing).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = serving => {}
                () = connection.close.notified() => {}
            }
            open.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        });
    }

    /// Closes the connection that is of least use, if one is idle or waits for the rest of a request: of those
    /// that never were of use the oldest.
    pub fn close_idle(&self) -> bool {
        let mut open = self.lock();
        let idle = open.iter().filter(|(_, c)| c.requests.load(Ordering::Acquire) == 0);
        let order = |(number, c): &(&u64, &Arc<Connection>)| {
            (c.served.load(Ordering::Relaxed) > 0, **number)
        };
        let Some((&number, connection)) = idle.min_by_key(order) else { return false };
        connection.close.notify_one();
        open.remove(&number);
        true
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers the requests of one connection until either side ends it.
async fn serve<S>(
    stream: S,
    router: Router,
    connection: Arc<Connection>,
    mut closing: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let stream = Stall::new(stream, WRITE_TIME, Arc::clone(&connection.unread));
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let whole = AtomicBool::new(false);
        connection.unread.store(true, Ordering::Release);
        let busy = Arc::new(Busy { connection: Arc::clone(&connection), whole });
        if request.body().is_end_stream() {
            busy.is_whole();
        }
        request.extensions_mut().insert(Arc::clone(&busy));
        let answer = hyper::service::Service::call(&router, request);
        async move {
            let response: Result<Response<Body>, Infallible> = answer.await;
            drop(busy);
            response
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // How a client ends a connection is no news.
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = async { closing.wait_for(|closing| *closing).await.is_ok() } => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
