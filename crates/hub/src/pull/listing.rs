//! What a hub says is in a repository, and which of it is a checkpoint.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::folder::{self, INDEX, SINGLE, is_plain_name};
use crate::json;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// Its name; it lies at the repository's top.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Hexadecimal SHA-256, where the hub knows it: of files that it keeps apart from Git.
    pub sha256: Option<String>,
}

/// The files at the top of a repository at one revision.
#[derive(Debug)]
pub struct Listing(Vec<Remote>);

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

impl Listing {
    /// Reads the hub's answer, a JSON array. Entries that are no plain files at the top are left out.
    pub fn parse(text: &[u8]) -> model::Result<Self> {
        let entries: Vec<Entry> = json::parse(text)?;
        let mut files: Vec<Remote> = Vec::new();
        for Entry { kind, path, size, lfs } in entries {
            if kind != "file" || !is_plain_name(&path) {
                continue;
            }
            if files.iter().any(|file| file.name == path) {
                return Err(model::Error::mismatch(format_args!("file `{path}`"), "one", "two"));
            }
            let sha256 = lfs.as_ref().map(|lfs| lfs.oid.to_ascii_lowercase());
            if let Some(hash) = &sha256
                && (hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()))
            {
                let field = format!("hash of `{path}`");
                return Err(model::Error::mismatch(field, "64 hexadecimal digits", hash));
            }
            let size = lfs.map_or(size, |lfs| lfs.size);
            files.push(Remote { name: path, size, sha256 });
        }
        Ok(Self(files))
    }

    /// The file with this name.
    pub fn find(&self, name: &str) -> model::Result<&Remote> {
        self.0.iter().find(|file| file.name == name).ok_or_else(|| {
            model::Error::mismatch(format_args!("file `{name}` of the repository"), "one", "none")
        })
    }

    /// The one file of weights, or the index of several.
    pub fn weights(&self) -> model::Result<&Remote> {
        self.find(SINGLE).or_else(|_| self.find(INDEX))
    }

    /// The files that an index names, each once and in order of its name.
    pub fn shards(&self, index: &[u8]) -> model::Result<Vec<&Remote>> {
        let map = folder::parse_index(index)?;
        let names: BTreeSet<&str> = map.iter().map(|(_, file)| &**file).collect();
        names.into_iter().map(|name| self.find(name)).collect()
    }
}
