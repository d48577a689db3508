//! Which bytes of an unfinished download are there: a file beside it that grows a line a write, so that a process
//! that dies at any moment loses only what it had not written. Bytes go to the download first and to the journal then.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use super::listing::Remote;

/// The parts of a file that have come.
#[derive(Debug)]
pub struct Journal {
    file: File,
    have: Ranges,
    /// The server's name of the content that they are of, if it gave one.
    etag: Option<String>,
}

/// Ranges apart from each other, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Journal {
    /// Opens the journal of a download of `remote`; a new one if there is none, or one of another content.
    pub fn open(path: &Path, remote: &Remote) -> io::Result<Self> {
        let header = header(remote);
        let text = fs::read(path).unwrap_or_default();
        let known = parse(&text, &header, remote.size);
        // A torn last line would swallow the next one, so what was understood is written anew.
        let (have, etag) = known.unwrap_or_default();
        let mut lines = header;
        if let Some(etag) = &etag {
            lines += &format!("etag {etag}\n");
        }
        for Range { start, end } in &have.0 {
            lines += &format!("{start} {end}\n");
        }
        let new = path.with_added_extension("new");
        fs::write(&new, lines)?;
        fs::rename(&new, path)?;
        Ok(Self { file: File::options().append(true).open(path)?, have, etag })
    }

    /// What is there.
    pub fn have(&self) -> &Ranges {
        &self.have
    }

    /// Notes bytes that have been written to the download.
    pub fn add(&mut self, range: Range<u64>) -> io::Result<()> {
        self.file.write_all(format!("{} {}\n", range.start, range.end).as_bytes())?;
        self.have.add(range);
        Ok(())
    }

    /// Whether a content that the server names so is the one that is here.
    pub fn agrees(&mut self, etag: Option<&str>) -> io::Result<bool> {
        match (&self.etag, etag) {
            (Some(known), Some(etag)) => Ok(known == etag),
            (None, Some(etag)) if !etag.contains(char::is_control) => {
                self.file.write_all(format!("etag {etag}\n").as_bytes())?;
                self.etag = Some(etag.to_owned());
                Ok(true)
            }
            _ => Ok(true),
        }
    }
}

fn header(remote: &Remote) -> String {
    format!("kipp 1 {} {}\n", remote.size, remote.sha256.as_deref().unwrap_or("-"))
}

/// What a journal with this header says of a file of `size` bytes; nothing if a whole line is not understood.
pub fn parse(text: &[u8], header: &str, size: u64) -> Option<(Ranges, Option<String>)> {
    let text = std::str::from_utf8(text).ok()?;
    // The last line counts only if it is whole.
    let whole = &text[..=text.rfind('\n')?];
    let (mut have, mut etag) = (Ranges::default(), None);
    for line in whole.strip_prefix(header)?.lines() {
        if let Some(tag) = line.strip_prefix("etag ") {
            etag = Some(tag.to_owned());
            continue;
        }
        let (start, end) = line.split_once(' ')?;
        let range: Range<u64> = start.parse().ok()?..end.parse().ok()?;
        if range.is_empty() || range.end > size {
            return None;
        }
        have.add(range);
    }
    Some((have, etag))
}

impl Ranges {
    fn add(&mut self, new: Range<u64>) {
        let first = self.0.partition_point(|range| range.end < new.start);
        let last = self.0.partition_point(|range| range.start <= new.end);
        let touched = &self.0[first..last];
        let start = touched.first().map_or(new.start, |range| range.start.min(new.start));
        let end = touched.last().map_or(new.end, |range| range.end.max(new.end));
        self.0.splice(first..last, std::iter::once(start..end));
    }

    /// Bytes from the beginning without a gap.
    pub fn prefix(&self) -> u64 {
        self.0.first().filter(|range| range.start == 0).map_or(0, |range| range.end)
    }

    /// Bytes in all.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// What is missing of `size` bytes, in pieces of at most `piece`.
    pub fn gaps(&self, size: u64, piece: u64) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        let end = size..size;
        for range in self.0.iter().chain([&end]) {
            while at < range.start {
                let to = range.start.min(at.saturating_add(piece));
                gaps.push(at..to);
                at = to;
            }
            at = range.end;
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_and_leave_gaps() {
        let mut ranges = Ranges::default();
        for (start, end) in [(10, 20), (30, 40), (20, 25), (0, 5), (24, 31)] {
            ranges.add(start..end);
        }
        assert_eq!(ranges.0, [0..5, 10..40]);
        assert_eq!((ranges.prefix(), ranges.bytes()), (5, 35));
        assert_eq!(ranges.gaps(60, 15), [5..10, 40..55, 55..60]);
        ranges.add(5..10);
        assert_eq!(ranges.0, std::iter::once(0..40).collect::<Vec<_>>());
        assert_eq!(ranges.gaps(40, 15), []);
    }

    #[test]
    fn a_journal_that_is_torn_or_of_another_content_is_not_believed() {
        let header = "kipp 1 100 -\n";
        let parse = |lines: &str| parse(format!("{header}{lines}").as_bytes(), header, 100);
        let (have, etag) = parse("0 10\netag \"a\"\n10 20\n30 4").expect("sound");
        assert_eq!((have.0, etag.as_deref()), (std::iter::once(0..20).collect(), Some("\"a\"")));
        for wrong in ["10 0\n", "0 101\n", "x\n", "0 -1\n", "5 5\n"] {
            assert!(parse(wrong).is_none(), "{wrong}");
        }
        assert!(super::parse(b"kipp 1 99 -\n0 10\n", header, 100).is_none());
        assert!(super::parse(b"", header, 100).is_none());
    }
}
