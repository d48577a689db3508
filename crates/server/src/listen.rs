//! Connections: accepting them, bounding them, encrypting them, and letting them end in order.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::app::{App, Loaded};
use crate::routes::router;
use crate::stall::Stall;

/// How long the head of a request may take to arrive, and a connection may be idle before it.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// How long a TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// How long a reader may take nothing of what it is sent.
const WRITE_TIME: Duration = Duration::from_secs(60);
/// Bytes that a request's head may take.
const MAX_HEAD: usize = 64 << 10;
/// Cores of the machine for each thread that serves connections.
const CORES_A_WORKER: usize = 4;
/// How long to wait before accepting again after the system refused.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How to serve.
pub struct Config {
    /// Where to listen.
    pub address: SocketAddr,
    /// Keys that let a request in; none are needed if empty.
    pub api_keys: Vec<String>,
    /// Web origins that may use the server from a browser, besides pages of this machine; `*` is any.
    pub cors_origins: Vec<String>,
    /// Largest body of a request, in bytes.
    pub max_body: usize,
    /// Connections at once; idle ones give way to new ones.
    pub max_connections: usize,
    /// Longest time for one answer.
    pub request_timeout: Duration,
    /// Whether anyone who reaches the address may use it without a key.
    pub allow_open: bool,
    /// Certificate and key, to serve over TLS.
    pub tls: Option<Tls>,
}

/// Files in PEM format.
pub struct Tls {
    /// The certificate and those that lead to its root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why the server could not start or go on.
#[derive(Debug)]
pub enum Error {
    /// Without a key, only this machine may reach the server.
    Open(SocketAddr),
    /// The address cannot be listened on.
    Listen(SocketAddr, io::Error),
    /// A certificate or key that is of no use.
    Tls(String),
    /// The model could not be loaded.
    Load(String),
    /// The system refused something else.
    System(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Open(address) => write!(
                f,
                "--host: {address} can be reached from other machines; expected an --api-key, or \
                 --allow-open to serve everyone"
            ),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Tls(what) => write!(f, "TLS: {what}"),
            Error::Load(why) => f.write_str(why),
            Error::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

/// How the server came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every request was answered.
    Drained,
    /// It was told a second time, while requests were being answered.
    AtOnce,
}

/// A server that listens and has not been started.
pub struct Server {
    listener: std::net::TcpListener,
    tls: Option<TlsAcceptor>,
    app: Arc<App>,
    max_connections: usize,
}

impl Server {
    /// Checks the configuration and starts to listen; connections wait until the server runs.
    pub fn bind(config: Config) -> Result<Self, Error> {
        let address = config.address;
        if !address.ip().is_loopback() && config.api_keys.is_empty() && !config.allow_open {
            return Err(Error::Open(address));
        }
        let tls = config.tls.as_ref().map(acceptor).transpose()?;
        let listen = || {
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener = listen().map_err(|error| Error::Listen(address, error))?;
        let max_connections = config.max_connections;
        let app = Arc::new(App::new(config));
        Ok(Server { listener, tls, app, max_connections })
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Loads the model while it already says that it is not ready, then serves until `stop` resolves,
    /// and drains: no new requests, the running ones to their end, unless `stop_at_once` resolves.
    pub fn run<L, S, A>(self, load: L, stop: S, stop_at_once: A) -> Result<Ended, Error>
    where
        L: FnOnce() -> Result<Loaded, String> + Send + 'static,
        S: Future<Output = ()> + Send + 'static,
        A: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers())
            .enable_all()
            .build();
        let runtime = runtime.map_err(Error::System)?;
        let ended = runtime.block_on(self.serve(load, stop, stop_at_once));
        // What is still running then was told to end at once.
        runtime.shutdown_background();
        ended
    }

    async fn serve<L, S, A>(self, load: L, stop: S, stop_at_once: A) -> Result<Ended, Error>
    where
        L: FnOnce() -> Result<Loaded, String> + Send + 'static,
        S: Future<Output = ()>,
        A: Future<Output = ()>,
    {
        let listener = TcpListener::from_std(self.listener).map_err(Error::System)?;
        let app = Arc::clone(&self.app);
        let mut loading = tokio::task::spawn_blocking(move || {
            app.load(load()?);
            Ok(())
        });
        let mut loaded = false;
        let (closing, _) = watch::channel(false);
        let mut connections = Connections {
            router: router(Arc::clone(&self.app)),
            tls: self.tls,
            most: self.max_connections,
            open: Arc::default(),
            closing: closing.clone(),
            next: 0,
        };
        let mut tasks = JoinSet::new();
        let mut stop = pin!(stop);
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => connections.start(stream, &mut tasks),
                    // The process or the system is out of something: sockets as a rule.
                    Err(_) => {
                        connections.close_idle();
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = tasks.join_next() => {}
                result = &mut loading, if !loaded => {
                    loaded = true;
                    let result = result.unwrap_or_else(|_| Err("loading failed".to_owned()));
                    result.map_err(Error::Load)?;
                }
                () = &mut stop => break,
            }
        }
        drop(listener);
        // Connections that are idle close now, the others behind their answer.
        let _ = closing.send(true);
        let drain = async {
            while tasks.join_next().await.is_some() {}
            if let Ok(engine) = self.app.engine() {
                engine.service.drain();
            }
        };
        tokio::select! {
            () = drain => Ok(Ended::Drained),
            () = stop_at_once => Ok(Ended::AtOnce),
        }
    }
}

/// Threads that serve connections. The processor belongs to the model: every thread that wakes beside those
/// that compute makes all of them wait for one another.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() / CORES_A_WORKER).max(1)
}

/// Reads the certificate and the key.
fn acceptor(tls: &Tls) -> Result<TlsAcceptor, Error> {
    let bad =
        |path: &PathBuf, why: &dyn fmt::Display| Error::Tls(format!("{}: {why}", path.display()));
    let read = |path: &PathBuf| std::fs::read(path).map_err(|error| bad(path, &error));
    let pem = read(&tls.certificate)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| bad(&tls.certificate, &error))?;
    let key = PrivateKeyDer::from_pem_slice(&read(&tls.key)?).map_err(|e| bad(&tls.key, &e))?;
    let config = ServerConfig::builder().with_no_client_auth();
    let mut config = config
        .with_single_cert(certificates, key)
        .map_err(|error| bad(&tls.certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The open connections, by number; a lower number is older.
type Open = Mutex<HashMap<u64, Arc<Connection>>>;

struct Connections {
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
    /// Serves a stream on a task of its own, if there is or can be made room for it.
    fn start(&mut self, stream: TcpStream, tasks: &mut JoinSet<()>) {
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
    fn close_idle(&self) -> bool {
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
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let whole = AtomicBool::new(false);
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
        .serve_connection(TokioIo::new(Stall::new(stream, WRITE_TIME)), service);
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
