//! A checkpoint as published: a folder with one safetensors file, or several and an index.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Display;
use std::path::{Component, Path, PathBuf};

use model::float::bf16_to_f32;
use model::layout::{self, Tensor};
use model::source::Source;
use model::tensor::Bytes;
use model::{Checkpoint, Error, Result, Scheme};
use serde::Deserialize;

use crate::json::{self, Object};
use crate::safetensors::Safetensors;
use crate::{config, tokenizer};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
/// The one type that the family is published in.
const DTYPE: &str = "BF16";

/// A published checkpoint that matches its registry entry.
#[derive(Debug)]
pub struct Folder {
    /// The safetensors files, in order of their names.
    pub files: Vec<PathBuf>,
    /// bfloat16 bytes of every tensor of the checkpoint, by upstream name.
    tensors: HashMap<String, Bytes>,
}

impl Folder {
    /// Opens a folder and checks configuration, tokenizer and tensors against the registry entry.
    /// No weight is read, save those of a head that a tied checkpoint carries all the same.
    pub fn open(dir: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        config::check(&dir.join("config.json"), &checkpoint.spec)?;
        let tokens = dir.join("tokenizer.json");
        if tokens.exists() {
            tokenizer::check(&tokens, checkpoint.vocabulary())?;
        }
        let (files, mut found) =
            if dir.join(SINGLE).exists() { single(&dir.join(SINGLE))? } else { sharded(dir)? };
        if checkpoint.spec.tied
            && let Some(head) = found.remove(HEAD)
        {
            drop_tied_head(&head, found.get(EMBEDDING))?;
        }
        let mut tensors = HashMap::new();
        for tensor in layout::tensors(&checkpoint.spec, Scheme::Bf16, Scheme::Bf16) {
            let found = found.remove(&tensor.upstream);
            tensors.insert(tensor.upstream.clone(), checked(&tensor, found)?);
        }
        if let Some((name, found)) = found.iter().min_by_key(|(name, _)| *name) {
            return Err(Error::mismatch(
                format_args!("tensor `{name}`"),
                format_args!("no such tensor in {}", checkpoint.id),
                "one",
            )
            .in_file(&found.path));
        }
        Ok(Self { files, tensors })
    }
}

impl Source for Folder {
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        let bytes = &self.tensors[&tensor.upstream][row * tensor.cols * 2..];
        for (value, bits) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = bf16_to_f32(u16::from_le_bytes(*bits));
        }
    }

    fn check(&self) -> Result<()> {
        self.tensors.values().try_for_each(Bytes::check)
    }
}

/// A tensor and the file that holds it.
struct Found {
    path: PathBuf,
    dtype: String,
    shape: Vec<u64>,
    bytes: Bytes,
}

type Files = (Vec<PathBuf>, HashMap<String, Found>);

fn single(path: &Path) -> Result<Files> {
    let mut found = HashMap::new();
    collect(path, &mut found)?;
    Ok((vec![path.to_owned()], found))
}

/// The index says which file holds each tensor; the files have to agree with it, tensor by tensor.
fn sharded(dir: &Path) -> Result<Files> {
    let path = dir.join(INDEX);
    let text = std::fs::read(&path).map_err(|error| Error::Io(error).in_file(&path))?;
    let weight_map = parse_index(&text).map_err(|error| error.in_file(&path))?;
    let fault = |field, expected: &dyn Display, found: &dyn Display| {
        Err(Error::mismatch(field, expected, found).in_file(&path))
    };
    let mut files = BTreeSet::new();
    for (tensor, file) in &weight_map {
        if !dir.join(file).is_file() {
            let field = format!("weight_map: file of tensor `{tensor}`");
            return fault(field, &format_args!("{file} to be there"), &"no such file");
        }
        files.insert(dir.join(file));
    }
    let mut found = HashMap::new();
    files.iter().try_for_each(|file| collect(file, &mut found))?;
    let listed: HashSet<_> = weight_map.iter().map(|(tensor, _)| tensor).collect();
    for (tensor, file) in &weight_map {
        let place = found.get(tensor).map(|found| &found.path);
        if place != Some(&dir.join(file)) {
            let place = place.map_or("none".into(), |place| format!("it in {}", place.display()));
            return fault(
                format!("weight_map: tensor `{tensor}`"),
                &format_args!("it in {file}"),
                &place,
            );
        }
    }
    if let Some(tensor) = found.keys().filter(|tensor| !listed.contains(tensor)).min() {
        let place = format!("it in {}", found[tensor].path.display());
        return fault(format!("weight_map: tensor `{tensor}`"), &"an entry for it", &place);
    }
    Ok((files.into_iter().collect(), found))
}

/// Which file beside an index holds each tensor, `(tensor, file)`.
pub(crate) fn parse_index(text: &[u8]) -> Result<Vec<(String, String)>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: Object<String>,
    }
    let Index { weight_map: Object(weight_map) } = json::parse(text)?;
    match weight_map.iter().find(|(_, file)| !is_plain_name(file)) {
        None => Ok(weight_map),
        Some((tensor, file)) => Err(Error::mismatch(
            format_args!("weight_map: file of tensor `{tensor}`"),
            "the name of a file beside it",
            format_args!("{file:?}"),
        )),
    }
}

/// Whether a name is that of a file in the same folder, on every system.
pub(crate) fn is_plain_name(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!(components.next(), Some(Component::Normal(_)))
        && components.next().is_none()
        && !file.contains(['/', '\\', ':'])
}

fn collect(path: &Path, found: &mut HashMap<String, Found>) -> Result<()> {
    let file = Safetensors::open(path)?;
    for tensor in &file.tensors {
        let bytes = file.bytes(tensor);
        let (dtype, shape) = (tensor.dtype.clone(), tensor.shape.clone());
        let entry = Found { path: path.to_owned(), dtype, shape, bytes };
        if let Some(other) = found.insert(tensor.name.clone(), entry) {
            let expected = format!("only in {}", other.path.display());
            return Err(Error::mismatch(
                format_args!("tensor `{}`", tensor.name),
                expected,
                "a second one",
            )
            .in_file(path));
        }
    }
    Ok(())
}

/// Compares a tensor with the layout.
fn checked(tensor: &Tensor, found: Option<Found>) -> Result<Bytes> {
    let field = |what| format!("tensor `{}`: {what}", tensor.upstream);
    let found = found.ok_or_else(|| Error::mismatch(field("presence"), "one", "none"))?;
    if found.dtype != DTYPE {
        return Err(Error::mismatch(field("dtype"), DTYPE, found.dtype).in_file(&found.path));
    }
    if found.shape != tensor.shape() {
        let (expected, shape) = (format!("{:?}", tensor.shape()), format!("{:?}", found.shape));
        return Err(Error::mismatch(field("shape"), expected, shape).in_file(&found.path));
    }
    Ok(found.bytes)
}

/// A tied checkpoint may carry its head all the same; it has to be the embedding.
fn drop_tied_head(head: &Found, embedding: Option<&Found>) -> Result<()> {
    let same = embedding.is_some_and(|embedding| {
        (&head.dtype, &head.shape) == (&embedding.dtype, &embedding.shape)
            && *head.bytes == *embedding.bytes
    });
    if same {
        return Ok(());
    }
    let field = format!("tensor `{HEAD}` of a tied checkpoint");
    Err(Error::mismatch(field, format_args!("the bytes of `{EMBEDDING}`"), "others")
        .in_file(&head.path))
}
