//! `kipp serve`: the model over HTTP.

use std::future::Future;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use engine::batch::BLOCK;
use engine::{Engine, KvConfig, Service, Settings};
use model::Spec;
use server::{Card, Config, Ended, Loaded, Server, Tls, listen};
use tokio::sync::watch;

use crate::backends::BackendName;
use crate::options::{ModelOptions, parse_size, tokenizer_of};
use crate::output::{self, complain, size, wrong_usage};
use crate::speculation::SpeculationOptions;
use crate::store::BUILTIN;

/// Contexts as long as the checkpoint allows that a cache is to hold; few are ever full.
const WHOLE: usize = 4;

/// Serves the model over HTTP.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    speculation: SpeculationOptions,
    /// Address to listen on
    #[arg(long, env = "KIPP_HOST", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes one that is free
    #[arg(long, env = "KIPP_PORT", default_value_t = 8080)]
    port: u16,
    /// Key that requests must carry; may be given several times
    #[arg(long, env = "KIPP_API_KEY", hide_env_values = true)]
    api_key: Vec<String>,
    /// File with one such key a line
    #[arg(long, env = "KIPP_API_KEY_FILE")]
    api_key_file: Option<PathBuf>,
    /// Let everyone in who reaches an address beyond this machine
    #[arg(long, env = "KIPP_ALLOW_OPEN")]
    allow_open: bool,
    /// Web origin that may use the server from a browser, or *; may be given several times
    #[arg(long, env = "KIPP_CORS_ORIGIN", value_delimiter = ',')]
    cors_origin: Vec<String>,
    /// Name of the model in requests; the checkpoint's id if left out
    #[arg(long, env = "KIPP_MODEL_NAME")]
    name: Option<String>,
    /// Requests that are evaluated at once
    #[arg(long, env = "KIPP_MAX_SEQS", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    max_seqs: u16,
    /// Requests that may be in the server, running or waiting
    #[arg(long, env = "KIPP_MAX_REQUESTS", default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..))]
    max_requests: u16,
    /// Tokens that one step evaluates at most
    #[arg(long, env = "KIPP_TOKEN_BUDGET", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    token_budget: u16,
    /// Bytes for keys and values, e.g. 4096M. If left out, on an NVIDIA GPU four fifths of what is free there; on
    /// memory that other programs share (processor, Apple GPU) as many as the matrices would take in 16 bits or the
    /// contexts need, whichever is more and at most half of what is free: with --ctx one context a request of
    /// --max-seqs, else four. Where the system does not tell what is free (all but Linux), four contexts
    #[arg(long, env = "KIPP_KV_MEMORY", value_parser = parse_size)]
    kv_memory: Option<usize>,
    /// Largest body of a request in bytes
    #[arg(long, env = "KIPP_MAX_BODY", default_value = "16M", value_parser = parse_size)]
    max_body: usize,
    /// Connections at once; idle ones give way to new ones
    #[arg(long, env = "KIPP_MAX_CONNECTIONS", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    max_connections: u16,
    /// Seconds that one answer may take
    #[arg(long, env = "KIPP_REQUEST_TIMEOUT", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..))]
    request_timeout: u32,
    /// Certificate in PEM format, to serve over TLS
    #[arg(long, env = "KIPP_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, env = "KIPP_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    // A log that nobody reads any more ends no answer.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).log_internal_errors(false);
    log.with_ansi(false).init();
    let server = Server::bind(args.config()?).map_err(|error| match error {
        listen::Error::Open(_) => wrong_usage(error.to_string()),
        error => error.into(),
    })?;
    let scheme = if args.tls_cert.is_some() { "https" } else { "http" };
    let address = server.address()?;
    let (stop, stop_at_once) = signals()?;
    let load = move || -> Result<Loaded> {
        let (loaded, banner) = load(&args)?;
        complain(&format!("{banner}\nkipp listens on {scheme}://{address}"));
        Ok(loaded)
    };
    match server.run(load, stop, stop_at_once)? {
        Ended::Drained => Ok(()),
        // The engine may be in the middle of a step; nobody waits for it.
        Ended::AtOnce => std::process::exit(130),
    }
}

impl Args {
    fn config(&self) -> Result<Config> {
        let mut api_keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            api_keys.extend(text.lines().map(|line| line.trim().to_owned()));
        }
        let named = !api_keys.is_empty() || self.api_key_file.is_some();
        api_keys.retain(|key| !key.is_empty());
        if named && api_keys.is_empty() {
            let found = match &self.api_key_file {
                Some(path) => {
                    format!("--api-key-file: expected a key, found none in {}", path.display())
                }
                None => "--api-key: expected a key, found an empty one".to_owned(),
            };
            return Err(wrong_usage(found));
        }
        // Pages from files are of the origin "null".
        let is_origin = |o: &&String| *o == "*" || *o == "null" || o.contains("://");
        if let Some(other) = self.cors_origin.iter().find(|origin| !is_origin(origin)) {
            return Err(wrong_usage(format!(
                "--cors-origin: expected * or an origin such as https://example.org, found `{other}`"
            )));
        }
        let tls = self.tls_cert.clone().zip(self.tls_key.clone());
        Ok(Config {
            address: resolve(&self.host, self.port)?,
            api_keys,
            cors_origins: self.cors_origin.clone(),
            max_body: self.max_body,
            max_connections: usize::from(self.max_connections),
            request_timeout: Duration::from_secs(self.request_timeout.into()),
            allow_open: self.allow_open,
            tls: tls.map(|(certificate, key)| Tls { certificate, key }),
        })
    }

    /// The KV cache, given the positions that a request may have and the bytes that there are: what was asked
    /// for, or `room`, and never more than all requests at once could fill. Also those positions, which are
    /// fewer if the memory holds no more.
    fn kv(&self, spec: &Spec, context: usize, room: Option<u64>) -> Result<(KvConfig, usize)> {
        let layers = spec.layers;
        let one = self.model.kv_config(context);
        let most = one.blocks * usize::from(self.max_seqs);
        let each = KvConfig { blocks: 1, ..one }.bytes(layers);
        // The machine's memory is other programs' too: a cache that dwarfs its model is seldom filled, unless with
        // contexts of a length that somebody chose.
        let shared = self.model.backend != BackendName::Cuda;
        let wanted = if self.model.ctx.is_some() { most } else { WHOLE * one.blocks };
        let wanted = KvConfig { blocks: wanted, ..one }.bytes(layers);
        let modest = wanted.max(2 * spec.matrix_weights() as u64);
        let room = room.map(|room| if shared { room.min(modest) } else { room });
        let memory = self.kv_memory.map(|bytes| bytes as u64).or(room);
        let blocks = memory.map_or(WHOLE * one.blocks, |bytes| (bytes / each) as usize).min(most);
        let held = blocks * BLOCK;
        let found = memory.map(size).unwrap_or_default();
        if blocks == 0 {
            bail!(
                "--kv-memory: expected at least {} for {BLOCK} positions, found {found}",
                size(each)
            );
        }
        if held < context && self.model.ctx.is_some() {
            let needed = size(one.bytes(layers));
            bail!(
                "--ctx {context}: expected {needed} for keys and values, found {found}, which hold {held}"
            );
        }
        Ok((KvConfig { blocks, ..one }, context.min(held)))
    }
}

/// Opens the model and starts its engine; also what there is to tell about it.
fn load(args: &Args) -> Result<(Loaded, String)> {
    let model = args.model.open()?;
    let tokenizer = tokenizer_of(model.spec())?;
    let checkpoint = model.checkpoint().context("the model is of no registered checkpoint")?;
    let asked = args.model.context(&model)?;
    let mut prepared = args.model.prepare(&model)?;
    // Only now is it known what the weights leave.
    let (kv, context) = args.kv(model.spec(), asked, (prepared.room)())?;
    let backend = (prepared.make)(kv)?;
    let settings = Settings {
        max_running: args.max_seqs.into(),
        token_budget: args.token_budget.into(),
        context,
    };
    let mut engine = Engine::new(backend, tokenizer.vocabulary(), settings);
    let positions = kv.blocks * BLOCK;
    if let Some(speculation) = args.speculation.speculation(&args.model, &model, positions)? {
        engine.speculate(speculation);
    }
    let banner = format!(
        "checkpoint {} ({}), {}; context {context}{}; KV cache {} for {positions} positions; backend {} on {} threads",
        checkpoint.id,
        output::origin(&model),
        model.scheme.name(),
        if context < asked { format!(" of {asked}: the memory holds no more") } else { "".into() },
        size(kv.bytes(model.spec().layers)),
        args.model.backend.name(),
        args.model.threads(),
    );
    let (service, _) = Service::spawn(engine, args.max_requests.into())?;
    let alias = args.model.model.clone().unwrap_or_else(|| BUILTIN.into());
    let card = Card {
        id: args.name.clone().unwrap_or_else(|| checkpoint.id.to_owned()),
        alias: Some(alias),
        variant: checkpoint.variant,
        tokenizer,
        stops: checkpoint.stops(),
    };
    Ok((Loaded { card, service }, banner))
}

fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let mut addresses = (host, port).to_socket_addrs().with_context(|| format!("--host {host}"))?;
    addresses.next().with_context(|| format!("--host {host}: no such address"))
}

/// The first request to end, from the terminal or the system, and the second.
fn signals() -> Result<(impl Future<Output = ()>, impl Future<Output = ()>)> {
    let (count, seen) = watch::channel(0);
    ctrlc::set_handler(move || {
        count.send_modify(|count| *count += 1);
    })?;
    let reached = |least: u32| {
        let mut seen = seen.clone();
        async move {
            // The sender lives as long as the program.
            let _ = seen.wait_for(|&count| count >= least).await;
        }
    };
    Ok((reached(1), reached(2)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use model::Checkpoint;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Positions in the cache of the 0.6B with these flags and this much memory for it.
    fn positions(flags: &[&str], room: u64) -> usize {
        let line = [&["serve", "qwen3-0.6b"], flags].concat();
        let args = Line::try_parse_from(line).expect("flags").args;
        let spec = &Checkpoint::find("qwen3-0.6b").expect("registered").spec;
        let context = args.model.ctx.unwrap_or(spec.context);
        args.kv(spec, context, Some(room)).expect("room").0.blocks * BLOCK
    }

    #[test]
    fn a_cache_holds_the_contexts_that_were_asked_for() {
        let (plenty, scarce) = (1 << 40, 1 << 30);
        let whole = Checkpoint::find("qwen3-0.6b").expect("registered").spec.context;
        assert_eq!(positions(&[], plenty), 4 * whole);
        assert_eq!(positions(&["--ctx", "4096"], plenty), 32 * 4096);
        assert_eq!(positions(&["--ctx", "4096", "--max-seqs", "6"], plenty), 6 * 4096);
        // A GPU's memory is nobody else's.
        assert_eq!(positions(&["--backend", "cuda"], plenty), 32 * whole);
        let held = positions(&["--ctx", "4096"], scarce);
        assert!((4096..32 * 4096).contains(&held), "{held}");
        assert_eq!(positions(&["--ctx", "4096", "--kv-memory", "1g"], plenty), held);
    }
}
