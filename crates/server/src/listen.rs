//! The server from its configuration to its end: listening, loading the model, accepting, and letting what runs
//! end in order.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::app::{App, Loaded};
use crate::connections::Connections;
use crate::routes::router;

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
    /// Loading the model ended in a panic, which has been told.
    Load,
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
            Error::Load => f.write_str("loading the model failed"),
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
    /// and drains: no new requests, the running ones to their end, unless `stop_at_once` resolves. What loading
    /// fails with is passed on as it is.
    pub fn run<E, L, S, A>(self, load: L, stop: S, stop_at_once: A) -> Result<Ended, E>
    where
        E: From<Error> + Send + 'static,
        L: FnOnce() -> Result<Loaded, E> + Send + 'static,
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

    async fn serve<E, L, S, A>(self, load: L, stop: S, stop_at_once: A) -> Result<Ended, E>
    where
        E: From<Error> + Send + 'static,
        L: FnOnce() -> Result<Loaded, E> + Send + 'static,
        S: Future<Output = ()>,
        A: Future<Output = ()>,
    {
        let listener = TcpListener::from_std(self.listener).map_err(Error::System)?;
        let app = Arc::clone(&self.app);
        let load = move || load().map(|loaded| app.load(loaded));
        let mut loading = tokio::task::spawn_blocking(load);
        let mut loaded = false;
        let (closing, _) = watch::channel(false);
        let router = router(Arc::clone(&self.app));
        let mut connections =
            Connections::new(router, self.tls, self.max_connections, closing.clone());
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
                    result.unwrap_or_else(|_| Err(Error::Load.into()))?;
                    loaded = true;
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
    let none =
        |path, what: &str| bad(path, &format_args!("expected {what} in PEM format, found none"));
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| bad(&tls.certificate, &error))?;
    if certificates.is_empty() {
        return Err(none(&tls.certificate, "a certificate"));
    }
    let key = PrivateKeyDer::from_pem_slice(&read(&tls.key)?).map_err(|error| match error {
        pem::Error::NoItemsFound => none(&tls.key, "a private key"),
        error => bad(&tls.key, &error),
    })?;
    let config = ServerConfig::builder().with_no_client_auth();
    let mut config = config
        .with_single_cert(certificates, key)
        .map_err(|error| bad(&tls.certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
