//! The pinned revision of a checkpoint, fetched from a hub and converted.
//!
//! Whatever is half done lies in a folder of its own, so that a pull that ends at any moment leaves nothing that looks
//! complete and the next one goes on from there: parts with a journal while they come, whole files once their hash was
//! right, and the GGUF under its name when all of it is on the disk.

mod download;
mod journal;
mod listing;
mod remote;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use model::{Checkpoint, Origin, Scheme, layout, source};

use crate::digest;
use crate::error::{Error, Result};
use crate::folder::{Folder, SINGLE};
pub use crate::pull::journal::{Ranges, parse as parse_journal};
pub use crate::pull::listing::{Listing, Remote};
pub use crate::pull::remote::Hub;
use crate::pull::remote::Patience;

/// What a pull is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Files come from the hub, or what came before is checked.
    Fetching,
    /// Tensors are encoded and written.
    Converting,
}

/// How a pull got its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The cache of other programs in which they were, if they were.
    pub cache: Option<PathBuf>,
    /// Files of weights of which the hub told no hash: only their form was checked.
    pub unhashed: Vec<String>,
}

/// Folder of the unfinished work in a models' folder.
const DOWNLOADS: &str = "downloads";
/// How names of files of weights end.
const WEIGHTS: &str = ".safetensors";
/// Bytes that other files have at most; they are read whole.
const MOST_SMALL: u64 = 64 << 20;
/// Files beside the weights that a checkpoint is checked by.
const SMALL: [&str; 2] = ["config.json", "tokenizer.json"];

/// Brings a checkpoint's pinned revision here and writes its GGUF to `out`, in whose folder the unfinished work is
/// kept too. `progress` is told the stage, the bytes done and the bytes in all.
pub fn pull(
    hub: &Hub,
    checkpoint: &'static Checkpoint,
    schemes: (Scheme, Scheme),
    out: &Path,
    progress: &mut dyn FnMut(Stage, u64, u64),
) -> Result<Pulled> {
    let models = out.parent().unwrap_or(Path::new("."));
    let work = unfinished(models, checkpoint);
    create(&models.join(DOWNLOADS))?;
    let _lock = lock(&work.with_added_extension("lock"))?;

    let never = || false;
    let listing = hub.list(checkpoint, &mut Patience::new(hub, &never))?;
    let output = layout::bytes(&checkpoint.spec, schemes.0, schemes.1);
    let cache = hub.cache.as_ref().map(|cache| snapshot(cache, checkpoint));
    if let Some(cache) = cache
        && let Some(files) = cached(&listing, &cache, checkpoint)
    {
        space(models, output)?;
        write(&cache, checkpoint, schemes, files, out, progress)?;
        return Ok(Pulled { cache: Some(cache), unhashed: Vec::new() });
    }

    create(&work)?;
    let fetch = |remote: &Remote, progress: &mut dyn FnMut(u64)| {
        fetch(hub, checkpoint, remote, &work, progress)
    };
    for name in SMALL {
        fetch(listing.find(name)?, &mut |_| {})?;
    }
    let shards = shards(&listing, |index| Ok(fetch(index, &mut |_| {})?.0))?;
    let total: u64 = shards.iter().map(|remote| remote.size).sum();
    let mut missing = total;
    for remote in &shards {
        missing -= download::have(&work.join(&remote.name), remote)?;
    }
    space(models, missing + output)?;

    let (mut before, mut files) = (0, Vec::new());
    for remote in &shards {
        files.push(fetch(remote, &mut |have| progress(Stage::Fetching, before + have, total))?);
        before += remote.size;
    }
    write(&work, checkpoint, schemes, files, out, progress)?;
    fs::remove_dir_all(&work).map_err(Error::of_file(&work))?;
    let unhashed = shards.iter().filter(|remote| remote.sha256.is_none());
    Ok(Pulled { cache: None, unhashed: unhashed.map(|remote| remote.name.clone()).collect() })
}

/// Where the unfinished work on a checkpoint is kept in a models' folder.
fn unfinished(models: &Path, checkpoint: &Checkpoint) -> PathBuf {
    models.join(DOWNLOADS).join(checkpoint.id)
}

/// Whether an unfinished pull of a checkpoint left something in a models' folder.
pub fn is_unfinished(models: &Path, checkpoint: &Checkpoint) -> bool {
    unfinished(models, checkpoint).exists()
}

/// Keeps pulls of a checkpoint away for as long as the value lives; refuses while one is at it.
pub fn hold(models: &Path, checkpoint: &Checkpoint) -> Result<Option<File>> {
    let work = unfinished(models, checkpoint);
    work.exists().then(|| lock(&work.with_added_extension("lock"))).transpose()
}

/// Forgets what unfinished pulls of a checkpoint left in a models' folder; says how many bytes they were.
pub fn forget(models: &Path, checkpoint: &Checkpoint) -> Result<u64> {
    let work = unfinished(models, checkpoint);
    if !work.exists() {
        return Ok(0);
    }
    let _lock = hold(models, checkpoint)?;
    let mut bytes = 0;
    let failed = Error::of_file(&work);
    for entry in fs::read_dir(&work).map_err(failed)? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(failed)?.len();
    }
    fs::remove_dir_all(&work).map_err(failed)?;
    Ok(bytes)
}

/// Holds a file for as long as the value lives; the system lets go of it if the process dies.
fn lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(Error::of_file(path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { lock: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(Error::of_file(path)(error)),
    }
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::of_file(folder))
}

/// Refuses early what cannot fit.
fn space(folder: &Path, needed: u64) -> Result<()> {
    let free = fs4::available_space(folder).map_err(Error::of_file(folder))?;
    if needed > free {
        return Err(Error::Space { folder: folder.to_owned(), needed, free });
    }
    Ok(())
}

/// Brings a file into the folder of the unfinished work: where it is, and its hash.
fn fetch(
    hub: &Hub,
    checkpoint: &Checkpoint,
    remote: &Remote,
    work: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(PathBuf, String)> {
    let path = work.join(&remote.name);
    if !remote.name.ends_with(WEIGHTS) {
        if remote.size > MOST_SMALL {
            let field = format!("bytes of `{}`", remote.name);
            let expected = format!("at most {MOST_SMALL}");
            return Err(model::Error::mismatch(field, expected, remote.size).into());
        }
        if remote.sha256.is_none() {
            // Nothing shows whether what an earlier pull left of it is right.
            download::discard(&path)?;
        }
    }
    let url = hub.url(checkpoint, &remote.name);
    let hash = download::fetch(hub, &url, remote, &path, progress)?;
    Ok((path, hash))
}

/// The files of weights: the one that there is, or those that the index names, which `index` brings.
fn shards(
    listing: &Listing,
    index: impl FnOnce(&Remote) -> Result<PathBuf>,
) -> Result<Vec<&Remote>> {
    let weights = listing.weights()?;
    if weights.name == SINGLE {
        return Ok(vec![weights]);
    }
    let path = index(weights)?;
    let text = fs::read(&path).map_err(Error::of_file(&path))?;
    Ok(listing.shards(&text).map_err(|error| error.in_file(&path))?)
}

/// Converts files whose hashes are known.
fn write(
    dir: &Path,
    checkpoint: &'static Checkpoint,
    schemes: (Scheme, Scheme),
    files: Vec<(PathBuf, String)>,
    out: &Path,
    progress: &mut dyn FnMut(Stage, u64, u64),
) -> Result<()> {
    let folder = Folder::open(dir, checkpoint)?;
    let sha256 = files.iter().map(|(path, hash)| digest::line(hash, path)).collect();
    let progress = |done, total| progress(Stage::Converting, done, total);
    source::write(out, checkpoint, schemes, &Origin::Pinned { sha256 }, &folder, progress)?;
    Ok(())
}

/// Where Hugging Face's programs keep the pinned revision inside their cache.
pub(crate) fn snapshot(cache: &Path, checkpoint: &Checkpoint) -> PathBuf {
    let repository = format!("models--{}", checkpoint.repository.replace('/', "--"));
    cache.join(repository).join("snapshots").join(checkpoint.revision)
}

/// The files of weights and their hashes, if the folder holds all that the listing asks for, hash by hash. A cache
/// that is not right in whatever way is one that does not hold it.
fn cached(
    listing: &Listing,
    folder: &Path,
    checkpoint: &Checkpoint,
) -> Option<Vec<(PathBuf, String)>> {
    let is_here = |remote: &Remote| {
        let there = folder.join(&remote.name).metadata();
        there.is_ok_and(|there| there.is_file() && there.len() == remote.size)
    };
    listing.weights().ok().filter(|&weights| is_here(weights))?;
    let shards = shards(listing, |index| Ok(folder.join(&index.name))).ok()?;
    let small = SMALL.iter().all(|name| listing.find(name).is_ok_and(is_here));
    if !small || !shards.iter().all(|shard| is_here(shard)) {
        return None;
    }
    Folder::open(folder, checkpoint).ok()?;
    let paths: Vec<PathBuf> = shards.iter().map(|remote| folder.join(&remote.name)).collect();
    let hashes = digest::of_files(&paths).ok()?;
    let same = |(hash, remote): (&String, &&Remote)| remote.sha256.as_ref() == Some(hash);
    hashes.iter().zip(&shards).all(same).then(|| paths.into_iter().zip(hashes).collect())
}
