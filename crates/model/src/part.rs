//! Files that appear under their names when they are whole.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that is being written, beside its place as `NAME.part`; it goes if it never becomes whole.
pub struct Part {
    file: File,
    part: PathBuf,
    path: PathBuf,
}

impl Part {
    /// An empty file on its way to `path`.
    pub fn create(path: &Path) -> io::Result<Self> {
        let part = path.with_added_extension("part");
        Ok(Part { file: File::create(&part)?, part, path: path.to_owned() })
    }

    /// Gives the file its name. All of it is on the disk then.
    pub fn complete(self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.part, &self.path)
    }

    /// Writes a whole file.
    pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut part = Part::create(path)?;
        part.write_all(bytes)?;
        part.complete()
    }
}

impl Write for Part {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Under its own name by now, or of no use.
        let _ = fs::remove_file(&self.part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_when_it_is_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("kipp-{}-part", std::process::id()));
        fs::create_dir_all(&folder).expect("made");
        let names = || {
            let entries = fs::read_dir(&folder).expect("a folder");
            entries.map(|entry| entry.expect("an entry").file_name()).collect::<Vec<_>>()
        };
        let path = folder.join("x.gguf");
        let mut part = Part::create(&path).expect("made");
        part.write_all(b"some").expect("written");
        assert_eq!(names(), ["x.gguf.part"]);
        drop(part);
        assert!(names().is_empty());
        Part::write(&path, b"all").expect("written");
        assert_eq!(names(), ["x.gguf"]);
        assert_eq!(fs::read(&path).expect("there"), b"all");
        fs::remove_dir_all(folder).expect("removed");
    }
}
