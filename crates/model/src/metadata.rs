//! The metadata of a checkpoint's GGUF: written from the registry entry, and checked against it
//! when a file is opened. The layout is that of llama.cpp's `qwen3` architecture plus a few keys of
//! kipp's own.

use std::borrow::Cow;

use crate::error::{Error, Result};
use crate::gguf::{ARCHITECTURE_KEY, Array, Gguf, TensorInfo, Value};
use crate::registry::Checkpoint;
use crate::scheme::Scheme;
use crate::spec::{HEAD_DIM, KV_HEADS, RMS_EPSILON, Spec};
use crate::tensor::TensorType;
use crate::vocabulary::{Marker, Vocabulary};

const ARCHITECTURE: &str = "qwen3";
/// Base of the rotary positions.
const THETA: &str = "rope.freq_base";
const FILE_TYPE: &str = "general.file_type";
const CHECKPOINT: &str = "kipp.checkpoint";
const SCHEME: &str = "kipp.scheme";
const REPOSITORY: &str = "kipp.source.repository";
const REVISION: &str = "kipp.source.revision";
const SHA256: &str = "kipp.source.sha256";
/// Files that a model of another program is cut into.
const SPLITS: &str = "split.count";
const TOKENS: &str = "tokenizer.ggml.tokens";
/// Stands for the repository where the weights are made up.
const SYNTHETIC: &str = "synthetic";
const SEED: &str = "seed ";
/// Stands for the repository where another program wrote the file that the weights were read from.
const FOREIGN: &str = "foreign";
/// Stands for a revision that nothing shows.
const UNKNOWN: &str = "unknown";

/// Where a model's weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The pinned revision of the upstream repository.
    Pinned {
        /// `<SHA-256>  <file name>` of each safetensors file, as sha256sum prints them.
        sha256: Vec<String>,
    },
    /// A published folder that matches the registry entry, but nothing shows which revision it is of.
    Unproven {
        /// As of [`Origin::Pinned`].
        sha256: Vec<String>,
    },
    /// Made up from a seed; see [`synthetic`](crate::synthetic).
    Synthetic {
        /// The seed.
        seed: u64,
    },
    /// A file that another program wrote: it matches a registry entry, but nothing pins its
    /// weights.
    Foreign,
}

type Pairs = Vec<(String, Value)>;

/// The metadata of a checkpoint's file.
pub(crate) fn describe(checkpoint: &Checkpoint, scheme: Scheme, origin: &Origin) -> Pairs {
    let mut pairs = general(checkpoint, scheme);
    pairs.extend(dimensions(&checkpoint.spec));
    pairs.extend(tokenizer(checkpoint.vocabulary()));
    pairs.extend(special_tokens(checkpoint));
    pairs.extend(provenance(checkpoint, scheme, origin));
    pairs
}

/// What a file's metadata says it is, all of it checked against the registry.
pub(crate) fn check(gguf: &Gguf) -> Result<(&'static Checkpoint, Scheme, Origin)> {
    let architecture = gguf.architecture()?;
    if architecture != ARCHITECTURE {
        let (expected, found) = (format!("{ARCHITECTURE:?}"), format!("{architecture:?}"));
        return Err(Error::mismatch(format_args!("`{ARCHITECTURE_KEY}`"), expected, found));
    }
    if let Some(files) = gguf.get(SPLITS).filter(|files| files.as_u64() != Some(1)) {
        let expected = "one file (llama.cpp's `llama-gguf-split --merge` puts several together)";
        return Err(Error::mismatch(format_args!("`{SPLITS}`"), expected, files));
    }
    neutral(gguf)?;
    if gguf.get(CHECKPOINT).is_none() || is_rewritten(gguf) {
        return check_foreign(gguf);
    }
    let id = require_str(gguf, CHECKPOINT)?;
    let checkpoint = Checkpoint::find(id).ok_or_else(|| {
        Error::mismatch(format_args!("`{CHECKPOINT}`"), "a registered checkpoint", id)
    })?;
    let scheme = require_str(gguf, SCHEME)?;
    let known = Scheme::ALL.into_iter().find(|known| known.name() == scheme);
    let scheme = known.ok_or_else(|| {
        Error::mismatch(format_args!("`{SCHEME}`"), "bf16, q8_0, q4_1 or q4_0", scheme)
    })?;
    let origin = origin(gguf)?;
    equal(gguf, &describe(checkpoint, scheme, &origin))?;
    Ok((checkpoint, scheme, origin))
}

fn general(checkpoint: &Checkpoint, scheme: Scheme) -> Pairs {
    vec![
        pair(ARCHITECTURE_KEY, string(ARCHITECTURE)),
        pair("general.type", string("model")),
        pair("general.name", string(checkpoint.name())),
        pair(FILE_TYPE, Value::U32(file_type(scheme))),
        pair("general.quantization_version", Value::U32(2)),
    ]
}

/// llama.cpp's number of the commonest tensor type.
const fn file_type(scheme: Scheme) -> u32 {
    match scheme {
        Scheme::Bf16 => 32,
        Scheme::Q8_0 => 7,
        Scheme::Q4_1 => 3,
        Scheme::Q4_0 => 2,
        Scheme::F16 => 1,
        Scheme::Q4K => 15,
        Scheme::Q5K => 17,
        Scheme::Q6K => 18,
    }
}

/// Whether another program quantised a file of kipp's: it copies keys that it does not know, which then describe what
/// the file was.
fn is_rewritten(gguf: &Gguf) -> bool {
    let scheme = gguf.get(SCHEME).and_then(Value::as_str).and_then(Scheme::from_name);
    let found = gguf.get(FILE_TYPE).and_then(Value::as_u64);
    scheme.is_some_and(|scheme| found.is_some_and(|found| found != u64::from(file_type(scheme))))
}

/// A key of the architecture's own.
fn own(key: &str) -> String {
    format!("{ARCHITECTURE}.{key}")
}

fn dimensions(spec: &Spec) -> Pairs {
    let number = |key: &str, value: usize| pair(&own(key), size(value));
    vec![
        number("block_count", spec.layers),
        number("context_length", spec.context),
        number("embedding_length", spec.hidden),
        number("feed_forward_length", spec.ffn),
        number("attention.head_count", spec.heads),
        number("attention.head_count_kv", KV_HEADS),
        number("attention.key_length", HEAD_DIM),
        number("attention.value_length", HEAD_DIM),
        pair(&own("attention.layer_norm_rms_epsilon"), Value::F32(RMS_EPSILON)),
        pair(&own(THETA), Value::F32(spec.theta)),
    ]
}

fn tokenizer(vocabulary: &Vocabulary) -> Pairs {
    let rows = vocabulary.rows();
    let tokens = Array::of_strings(rows, |id, text| vocabulary.spell(id as u32, text));
    let types = Array::of_i32((0..rows as u32).map(|id| vocabulary.kind(id) as i32));
    let mut pairs = vocabulary.merges();
    let merges = Array::of_strings(pairs.len(), |_, text| {
        pairs.next().into_iter().for_each(|pair| vocabulary.spell_merge(pair, text));
    });
    vec![
        pair("tokenizer.ggml.model", string("gpt2")),
        pair("tokenizer.ggml.pre", string("qwen2")),
        pair(TOKENS, Value::Array(tokens)),
        pair("tokenizer.ggml.token_type", Value::Array(types)),
        pair("tokenizer.ggml.merges", Value::Array(merges)),
    ]
}

fn special_tokens(checkpoint: &Checkpoint) -> Pairs {
    let id = |marker| Value::U32(checkpoint.vocabulary().id(marker));
    let [end, ..] = checkpoint.variant.stops() else {
        unreachable!("every variant has a stop token")
    };
    vec![
        pair("tokenizer.ggml.eos_token_id", id(*end)),
        pair("tokenizer.ggml.padding_token_id", id(Marker::EndOfText)),
        pair("tokenizer.ggml.bos_token_id", id(Marker::EndOfText)),
        pair("tokenizer.ggml.add_bos_token", Value::Bool(false)),
    ]
}

fn provenance(checkpoint: &Checkpoint, scheme: Scheme, origin: &Origin) -> Pairs {
    let mut pairs =
        vec![pair(CHECKPOINT, string(checkpoint.id)), pair(SCHEME, string(scheme.name()))];
    let (repository, revision, sha256) = match origin {
        Origin::Pinned { sha256 } => {
            (checkpoint.repository, checkpoint.revision.to_owned(), Some(sha256))
        }
        Origin::Unproven { sha256 } => (checkpoint.repository, UNKNOWN.into(), Some(sha256)),
        Origin::Synthetic { seed } => (SYNTHETIC, format!("{SEED}{seed}"), None),
        Origin::Foreign => (FOREIGN, UNKNOWN.into(), None),
    };
    pairs.extend([pair(REPOSITORY, string(repository)), pair(REVISION, Value::String(revision))]);
    if let Some(lines) = sha256 {
        let lines = Array::of_strings(lines.len(), |i, text| *text += &lines[i]);
        pairs.push(pair(SHA256, Value::Array(lines)));
    }
    pairs
}

/// The origin that a file of kipp's own names. Repository and revision are compared with the
/// registry's when everything is.
fn origin(gguf: &Gguf) -> Result<Origin> {
    let revision = require_str(gguf, REVISION)?;
    match require_str(gguf, REPOSITORY)? {
        SYNTHETIC => {
            let seed = revision.strip_prefix(SEED).and_then(|seed| seed.parse().ok());
            let wrong = || Error::mismatch(format_args!("`{REVISION}`"), "the seed", revision);
            return Ok(Origin::Synthetic { seed: seed.ok_or_else(wrong)? });
        }
        FOREIGN => return Ok(Origin::Foreign),
        _ => {}
    }
    let sha256 = require_array(gguf, SHA256)?.strings().map(Cow::into_owned).collect();
    Ok(if revision == UNKNOWN { Origin::Unproven { sha256 } } else { Origin::Pinned { sha256 } })
}

/// Refuses keys that no file of the family needs and that ask for a computation other than the family's: positions
/// that are stretched, experts, an embedding instead of a next token. Their neutral values may stand there.
fn neutral(gguf: &Gguf) -> Result<()> {
    let neutral = [
        ("rope.dimension_count", size(HEAD_DIM)),
        ("rope.scaling.type", string("none")),
        ("rope.scaling.factor", Value::F32(1.0)),
        ("rope.scaling.attn_factor", Value::F32(1.0)),
        ("rope.scale_linear", Value::F32(1.0)),
        ("attention.causal", Value::Bool(true)),
        ("expert_count", size(0)),
        ("pooling_type", size(0)),
    ];
    let present = neutral.map(|(key, value)| pair(&own(key), value));
    let present = present.into_iter().filter(|(key, _)| gguf.get(key).is_some());
    equal(gguf, &present.collect::<Pairs>())
}

/// A file without kipp's keys: its dimensions, and where they leave a choice its name, select the
/// entry.
fn check_foreign(gguf: &Gguf) -> Result<(&'static Checkpoint, Scheme, Origin)> {
    let number = |key: &str| {
        let key = own(key);
        let value = gguf.require(&key)?;
        value
            .as_u64()
            .and_then(|value| usize::try_from(value).ok())
            .ok_or_else(|| Error::mismatch(format_args!("`{key}`"), "a whole number", value))
    };
    let theta = match gguf.require(&own(THETA))? {
        Value::F32(theta) => *theta,
        other => return Err(Error::mismatch(format_args!("`{}`", own(THETA)), "a float", other)),
    };
    let mut spec = Spec {
        layers: number("block_count")?,
        hidden: number("embedding_length")?,
        ffn: number("feed_forward_length")?,
        heads: number("attention.head_count")?,
        vocab: require_array(gguf, TOKENS)?.len,
        context: number("context_length")?,
        theta,
        tied: gguf.tensors.iter().all(|tensor| tensor.name != "output.weight"),
    };
    let mut candidates: Vec<_> = Checkpoint::with_spec(&spec).collect();
    if candidates.is_empty() {
        // Converters keep the head that some tied checkpoints carry all the same.
        spec.tied = true;
        candidates.extend(Checkpoint::with_spec(&spec));
    }
    if candidates.len() > 1 {
        let name = require_str(gguf, "general.name")?.to_lowercase().replace([' ', '_'], "-");
        candidates.retain(|checkpoint| name.contains(checkpoint.id));
    }
    let [checkpoint] = candidates[..] else {
        let found = format!("{spec:?} and {} candidates", candidates.len());
        return Err(Error::mismatch("dimensions", "those of one registered checkpoint", found));
    };
    equal(gguf, &dimensions(&spec))?;
    equal(gguf, &tokenizer(checkpoint.vocabulary()))?;

    Ok((checkpoint, commonest(gguf)?, Origin::Foreign))
}

/// The scheme of most of the layers' weights; files of other programs mix them. One walk, since a file may name any
/// number of tensors.
fn commonest(gguf: &Gguf) -> Result<Scheme> {
    // A tensor of each type, and the weights of all.
    let mut types: Vec<(&TensorInfo, u64)> = Vec::new();
    let is_projection = |t: &&TensorInfo| t.name.starts_with("blk.") && t.dims.len() == 2;
    for tensor in gguf.tensors.iter().filter(is_projection) {
        let weights: u64 = tensor.dims.iter().product();
        match types.iter_mut().find(|(first, _)| first.ty == tensor.ty) {
            Some((_, sum)) => *sum = sum.saturating_add(weights),
            None => types.push((tensor, weights)),
        }
    }
    let most = types.iter().max_by_key(|(_, weights)| *weights);
    let (most, _) =
        most.ok_or_else(|| Error::mismatch("matrices of the layers", "some", "none"))?;
    scheme_of(&most.name, most.ty)
}

/// The scheme under which tensors have this type.
pub(crate) fn scheme_of(name: &str, ty: TensorType) -> Result<Scheme> {
    let mut schemes = Scheme::ALL.into_iter().chain(Scheme::FOREIGN);
    schemes
        .find(|scheme| scheme.tensor_type() == ty)
        .ok_or_else(|| Error::mismatch(format_args!("tensor `{name}`: type"), "any but F32", ty))
}

/// Compares values of a file with what they have to be.
fn equal(gguf: &Gguf, expected: &[(String, Value)]) -> Result<()> {
    for (key, expected) in expected {
        let found = gguf.require(key)?;
        let same_number = expected.as_u64().is_some() && expected.as_u64() == found.as_u64();
        if found != expected && !same_number {
            return Err(difference(key, expected, found));
        }
    }
    Ok(())
}

/// Of two arrays of one kind and length, the first elements that differ are named.
fn difference(key: &str, expected: &Value, found: &Value) -> Error {
    if let (Value::Array(expected), Value::Array(found)) = (expected, found)
        && (expected.element, expected.len) == (found.element, found.len)
    {
        let mut strings = expected.strings().zip(found.strings()).enumerate();
        if let Some((i, (expected, found))) = strings.find(|(_, (a, b))| a != b) {
            let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
            return Error::mismatch(format_args!("`{key}`[{i}]"), expected, found);
        }
        let mut numbers = expected.i32s().zip(found.i32s()).enumerate();
        if let Some((i, (expected, found))) = numbers.find(|(_, (a, b))| a != b) {
            return Error::mismatch(format_args!("`{key}`[{i}]"), expected, found);
        }
    }
    Error::mismatch(format_args!("`{key}`"), expected, found)
}

fn require_str<'a>(gguf: &'a Gguf, key: &str) -> Result<&'a str> {
    let value = gguf.require(key)?;
    value.as_str().ok_or_else(|| Error::mismatch(format_args!("`{key}`"), "a string", value))
}

fn require_array<'a>(gguf: &'a Gguf, key: &str) -> Result<&'a Array> {
    let value = gguf.require(key)?;
    value.as_array().ok_or_else(|| Error::mismatch(format_args!("`{key}`"), "an array", value))
}

fn pair(key: &str, value: Value) -> (String, Value) {
    (key.to_owned(), value)
}

fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// A dimension; all of them fit in 32 bits.
fn size(value: usize) -> Value {
    Value::U32(value as u32)
}
