//! One file of a hub: its missing parts by several connections, and behind them a reader that computes the hash of
//! what has come without a gap. The file gets its name when the hash is right.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::digest::hexadecimal;
use crate::error::{Error, Result};
use crate::pull::journal::Journal;
use crate::pull::listing::Remote;
use crate::pull::remote::{Hub, Patience, broken};

/// Bytes between two lines of the journal, and what is read and hashed at once.
const STEP: usize = 256 << 10;
/// How often the follower looks.
const LOOK: Duration = Duration::from_millis(20);
/// How often a file is begun anew because the server changed its content.
const CHANGES: u32 = 3;

/// The name of an unfinished file.
pub(super) fn part(path: &Path) -> PathBuf {
    path.with_added_extension("part")
}

/// The name of its journal.
fn journal(path: &Path) -> PathBuf {
    path.with_added_extension("journal")
}

fn open_journal(path: &Path, remote: &Remote) -> Result<Journal> {
    let journal = journal(path);
    Journal::open(&journal, remote).map_err(Error::of_file(&journal))
}

/// Bytes of a file that are here already.
pub(super) fn have(path: &Path, remote: &Remote) -> Result<u64> {
    if path.exists() {
        return Ok(remote.size);
    }
    if !part(path).exists() {
        return Ok(0);
    }
    Ok(open_journal(path, remote)?.have().bytes())
}

/// Fetches what is missing of a file and gives its SHA-256. `progress` hears how many bytes of it are here.
pub(super) fn fetch(
    hub: &Hub,
    url: &str,
    remote: &Remote,
    path: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<String> {
    for _ in 0..CHANGES {
        let part = part(path);
        let failed = Error::of_file(&part);
        if path.exists() {
            // Complete, but from an earlier run: it is looked at again, and fetched again if it is wrong.
            fs::rename(path, &part).map_err(failed)?;
            let mut journal = open_journal(path, remote)?;
            if remote.size > 0 {
                journal.add(0..remote.size).map_err(failed)?;
            }
        }
        // A part has its file's size from the beginning; of one that has not, the journal does not speak.
        if part.metadata().map_or(true, |part| part.len() != remote.size) {
            remove(&journal(path))?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(&part);
        let file = file.map_err(failed)?;
        file.set_len(remote.size).map_err(failed)?;
        let transfer = Transfer {
            hub,
            url,
            remote,
            part: &part,
            journal: Mutex::new(open_journal(path, remote)?),
            stop: AtomicBool::new(false),
            unranged: AtomicBool::new(false),
            changed: AtomicBool::new(false),
        };
        let outcome = transfer.run(progress);
        if transfer.changed.load(Ordering::Relaxed) {
            discard(path)?;
            continue;
        }
        let found = outcome?;
        if let Some(expected) = remote.sha256.as_ref().filter(|&expected| *expected != found) {
            discard(path)?;
            let (url, expected) = (url.to_owned(), expected.clone());
            return Err(Error::Answer { url, field: "SHA-256", expected, found });
        }
        file.sync_all().map_err(failed)?;
        fs::rename(&part, path).map_err(failed)?;
        remove(&journal(path))?;
        return Ok(found);
    }
    let (expected, found) = ("one content".into(), format!("{CHANGES} different ones"));
    Err(Error::Answer { url: url.to_owned(), field: "ETag", expected, found })
}

/// Forgets what has come of a file, all of it or not.
pub(super) fn discard(path: &Path) -> Result<()> {
    remove(path)?;
    remove(&journal(path))?;
    remove(&part(path))
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::of_file(path)(error)),
        _ => Ok(()),
    }
}

/// A download under way.
struct Transfer<'a> {
    hub: &'a Hub,
    url: &'a str,
    remote: &'a Remote,
    part: &'a Path,
    journal: Mutex<Journal>,
    /// Everybody is to end.
    stop: AtomicBool,
    /// The server sends whole files only.
    unranged: AtomicBool,
    /// The server's content is no longer the one of which parts are here.
    changed: AtomicBool,
}

impl Transfer<'_> {
    /// Fetches and hashes.
    fn run(&self, progress: &mut dyn FnMut(u64)) -> Result<String> {
        let gaps = |piece| self.journal().have().gaps(self.remote.size, piece);
        let pieces = Mutex::new(gaps(self.hub.piece));
        let failed = Mutex::new(None);
        let work = |pieces: &Mutex<Vec<Range<u64>>>, alone| {
            // The first failure tells why; those that follow from stopping do not.
            if let Err(error) = self.work(pieces, alone)
                && !self.stop.swap(true, Ordering::Relaxed)
            {
                *lock(&failed) = Some(error);
            }
        };
        let digest = thread::scope(|scope| {
            let fetcher = scope.spawn(|| {
                let count = lock(&pieces).len();
                thread::scope(|scope| {
                    for _ in 0..self.hub.connections.min(count) {
                        scope.spawn(|| work(&pieces, count == 1));
                    }
                });
                // What a server of whole files did not give to many is read in one go.
                work(&Mutex::new(gaps(u64::MAX)), true);
            });
            let digest = self.follow(progress, &|| fetcher.is_finished());
            // A follower that failed stops the others.
            self.stop.store(true, Ordering::Relaxed);
            digest
        })?;
        let incomplete = || Error::Answer {
            url: self.url.to_owned(),
            field: "bytes",
            expected: self.remote.size.to_string(),
            found: self.journal().have().bytes().to_string(),
        };
        digest.ok_or_else(|| lock(&failed).take().unwrap_or_else(incomplete))
    }

    /// One connection: takes pieces until there are none. If it is alone, a server may send it whole files.
    fn work(&self, pieces: &Mutex<Vec<Range<u64>>>, alone: bool) -> Result<()> {
        let stopped = || self.stop.load(Ordering::Relaxed);
        let mut file =
            File::options().write(true).open(self.part).map_err(Error::of_file(self.part))?;
        loop {
            let next = {
                let mut pieces = lock(pieces);
                if pieces.is_empty() { None } else { Some(pieces.remove(0)) }
            };
            let Some(mut piece) = next else { return Ok(()) };
            let mut patience = Patience::new(self.hub, &stopped);
            while !piece.is_empty() {
                if stopped() || (!alone && self.unranged.load(Ordering::Relaxed)) {
                    return Ok(());
                }
                let before = piece.start;
                let attempt = self.receive(&mut file, &mut piece, alone);
                if piece.start > before {
                    patience.restore();
                }
                if let Err(error) = attempt {
                    patience.wait(error)?;
                }
            }
        }
    }

    /// One request: moves the beginning of `piece` on by what came and was written.
    fn receive(&self, file: &mut File, piece: &mut Range<u64>, alone: bool) -> Result<()> {
        let mut stream = self.hub.read(self.url, self.remote, piece.clone())?;
        let agrees = self.journal().agrees(stream.etag.as_deref());
        if !agrees.map_err(|error| self.full(error))? {
            self.changed.store(true, Ordering::Relaxed);
            self.stop.store(true, Ordering::Relaxed);
            return Ok(());
        }
        if !stream.ranged && !alone {
            self.unranged.store(true, Ordering::Relaxed);
            return Ok(());
        }
        file.seek(SeekFrom::Start(piece.start)).map_err(|error| self.full(error))?;
        let mut buffer = vec![0; STEP];
        while !piece.is_empty() && !self.stop.load(Ordering::Relaxed) {
            let most = (piece.end - piece.start).min(STEP as u64) as usize;
            let (count, end) = fill(&mut stream.body, &mut buffer[..most]);
            let last = piece.start + count as u64 == self.remote.size;
            if last && end.is_none() && fill(&mut stream.body, &mut [0]).0 > 0 {
                // An answer without a length of its own can go on, and is then of another file.
                let (url, expected) = (self.url.to_owned(), self.remote.size.to_string());
                return Err(Error::Answer { url, field: "bytes", expected, found: "more".into() });
            }
            file.write_all(&buffer[..count]).map_err(|error| self.full(error))?;
            if count > 0 {
                let come = piece.start..piece.start + count as u64;
                let noted = self.journal().add(come);
                noted.map_err(|error| self.full(error))?;
                piece.start += count as u64;
            }
            match end {
                Some(Ok(())) if !piece.is_empty() => {
                    let expected = format!("{} more", piece.end - piece.start);
                    let (url, found) = (self.url.to_owned(), "the end".into());
                    return Err(Error::Answer { url, field: "bytes", expected, found });
                }
                Some(Err(error)) => return Err(broken(self.url, &error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// A failure to write; a full disk is told as what it is.
    fn full(&self, error: std::io::Error) -> Error {
        let folder = self.part.parent().unwrap_or(self.part);
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::Space {
                folder: folder.to_owned(),
                needed: self.remote.size - self.journal().have().bytes(),
                free: fs4::available_space(folder).unwrap_or(0),
            },
            _ => Error::of_file(self.part)(error),
        }
    }

    /// Hashes what is there without a gap while it grows, and tells how much there is. `None` if not all of it came.
    fn follow(
        &self,
        progress: &mut dyn FnMut(u64),
        finished: &dyn Fn() -> bool,
    ) -> Result<Option<String>> {
        let failed = Error::of_file(self.part);
        let mut file = File::open(self.part).map_err(failed)?;
        let (mut hash, mut at, mut buffer) = (Sha256::new(), 0, vec![0; STEP]);
        loop {
            // In this order: what the others wrote last is seen before their end.
            let ended = finished();
            let (prefix, have) = {
                let journal = self.journal();
                (journal.have().prefix(), journal.have().bytes())
            };
            progress(have);
            if at == self.remote.size {
                return Ok(Some(hexadecimal(&hash.finalize())));
            }
            if at == prefix {
                if ended {
                    return Ok(None);
                }
                thread::sleep(LOOK);
                continue;
            }
            let end = prefix.min(at + (STEP as u64) * 16);
            while at < end {
                let most = (end - at).min(STEP as u64) as usize;
                file.read_exact(&mut buffer[..most]).map_err(failed)?;
                hash.update(&buffer[..most]);
                at += most as u64;
            }
        }
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        lock(&self.journal)
    }
}

/// Fills the buffer as far as possible. The second is how the stream ended, if it did.
fn fill(stream: &mut dyn Read, buffer: &mut [u8]) -> (usize, Option<std::io::Result<()>>) {
    let mut count = 0;
    while count < buffer.len() {
        match stream.read(&mut buffer[count..]) {
            Ok(0) => return (count, Some(Ok(()))),
            Ok(more) => count += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (count, Some(Err(error))),
        }
    }
    (count, None)
}

/// A thread that panicked leaves nothing half done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
