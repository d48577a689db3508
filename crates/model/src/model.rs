//! A model: which checkpoint it is, how it is stored, where it comes from, and its weights.

use std::collections::HashMap;
use std::path::Path;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::layout::{self, Tensor};
use crate::mapping;
use crate::metadata::{self, Origin, scheme_of};
use crate::registry::Checkpoint;
use crate::scheme::Scheme;
use crate::source::{self, Source};
use crate::spec::Spec;
use crate::synthetic::Synthetic;
use crate::tensor::Bytes;
use crate::vocabulary::Vocabulary;
use crate::weights::Weights;

/// The file of kipp-tiny, aligned like the tensors in it.
static BUILTIN: Aligned<[u8; include_bytes!("../data/kipp-tiny.gguf").len()]> =
    Aligned(*include_bytes!("../data/kipp-tiny.gguf"));

#[repr(align(64))]
struct Aligned<T>(T);

const _: () = assert!(align_of::<Aligned<u8>>() == crate::gguf::ALIGNMENT as usize);

/// Which checkpoint a model is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Identity {
    /// One of the registry.
    Registered(&'static Checkpoint),
    /// None: only dimensions, for tests and benchmarks.
    Nameless(Spec),
}

impl From<&'static Checkpoint> for Identity {
    fn from(checkpoint: &'static Checkpoint) -> Self {
        Identity::Registered(checkpoint)
    }
}

impl From<Spec> for Identity {
    fn from(spec: Spec) -> Self {
        Identity::Nameless(spec)
    }
}

/// A checkpoint's weights, ready to run.
pub struct Model {
    /// Which checkpoint it is.
    pub identity: Identity,
    /// How the projections are stored.
    pub scheme: Scheme,
    /// How the embedding and the head are stored.
    pub head: Scheme,
    /// Where the weights come from.
    pub origin: Origin,
    /// The weights.
    pub weights: Weights,
}

impl Model {
    /// Maps a GGUF and checks it against the registry entry that it names or, if another program wrote it, whose
    /// dimensions it has. The weights themselves are not read.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(mapping::map(path)?).map_err(|error| error.in_file(path))
    }

    /// Like [`Self::open`] for a file that is in memory.
    pub fn read(file: Bytes) -> Result<Self> {
        let gguf = Gguf::read(file)?;
        let (checkpoint, scheme, origin) = metadata::check(&gguf)?;
        let mut found: HashMap<_, _> =
            gguf.tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
        let embedding = "token_embd.weight";
        let head = match found.get(embedding) {
            Some(tensor) => scheme_of(embedding, tensor.ty)?,
            // Its absence is reported with the other tensors'.
            None => scheme.default_head(),
        };
        let tensors = layout::tensors(&checkpoint.spec, scheme, head);
        let weights = Weights::bind(&tensors, checkpoint.spec.layers, |tensor| {
            let field = |what| format!("tensor `{}`: {what}", tensor.name);
            let Some(found) = found.remove(&*tensor.name) else {
                return Err(Error::mismatch(field("presence"), "one", "none"));
            };
            if found.ty != tensor.ty {
                return Err(Error::mismatch(field("type"), tensor.ty, found.ty));
            }
            if found.dims != tensor.dims() {
                let (expected, found) =
                    (format!("{:?}", tensor.dims()), format!("{:?}", found.dims));
                return Err(Error::mismatch(field("shape"), expected, found));
            }
            Ok(gguf.bytes(found))
        })?;
        if let Some(name) = found.keys().min() {
            return Err(Error::mismatch(
                format_args!("tensor `{name}`"),
                format_args!("no such tensor in {}", checkpoint.id),
                "one",
            ));
        }
        Ok(Self { identity: checkpoint.into(), scheme, head, origin, weights })
    }

    /// kipp-tiny, which is part of the program; its weights are used where they lie.
    pub fn builtin() -> Result<Self> {
        let file: &'static [u8] = &BUILTIN.0;
        Self::read(Bytes::new(file))
    }

    /// A synthetic model in memory, of a registered checkpoint or of any dimensions.
    pub fn synthetic(
        identity: impl Into<Identity>,
        (scheme, head): (Scheme, Scheme),
        seed: u64,
    ) -> Result<Self> {
        let origin = Origin::Synthetic { seed };
        Self::encode(identity.into(), (scheme, head), origin, &Synthetic { seed })
    }

    /// A model in memory from the rows of a source.
    pub fn encode(
        identity: Identity,
        (scheme, head): (Scheme, Scheme),
        origin: Origin,
        source: &impl Source,
    ) -> Result<Self> {
        let spec = match identity {
            Identity::Registered(checkpoint) => checkpoint.spec,
            Identity::Nameless(spec) => spec,
        };
        let tensors = layout::tensors(&spec, scheme, head);
        let weights = Weights::bind(&tensors, spec.layers, |tensor: &Tensor| {
            let mut buffer = mapping::buffer(tensor.bytes())?;
            source::encode(source, tensor, 0, &mut buffer)?;
            Ok(Bytes::new(buffer))
        })?;
        Ok(Self { identity, scheme, head, origin, weights })
    }

    /// Its dimensions.
    pub fn spec(&self) -> &Spec {
        match &self.identity {
            Identity::Registered(checkpoint) => &checkpoint.spec,
            Identity::Nameless(spec) => spec,
        }
    }

    /// Its registry entry, if it has one.
    pub fn checkpoint(&self) -> Option<&'static Checkpoint> {
        match self.identity {
            Identity::Registered(checkpoint) => Some(checkpoint),
            Identity::Nameless(_) => None,
        }
    }

    /// Its tokens, if it is of a size that has any.
    pub fn vocabulary(&self) -> Option<&'static Vocabulary> {
        Vocabulary::of(self.spec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builtin_model_is_kipp_tiny() {
        let model = Model::builtin().unwrap();
        assert_eq!(model.checkpoint(), Checkpoint::find("kipp-tiny"));
        assert_eq!((model.scheme, model.head), (Scheme::Bf16, Scheme::Bf16));
        let revision = Checkpoint::find("kipp-tiny").unwrap().revision;
        let sha256 = vec![format!("{revision}  model.safetensors")];
        assert_eq!(model.origin, Origin::Pinned { sha256 });
        assert_eq!(model.weights.embedding.bytes().as_ptr() as usize % 64, 0);
    }
}
