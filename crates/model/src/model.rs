//! A model: which checkpoint it is, how it is stored, where it comes from, and its weights.

use std::collections::HashMap;
use std::path::Path;

use crate::error::{Error, Result};
use crate::gguf::{Gguf, TensorInfo};
use crate::layout::{self, Role, Tensor};
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
    /// Maps a GGUF and checks it against the registry entry that it names or, if another program
    /// wrote it, whose dimensions it has. The weights themselves are not read.
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
        let mut tensors = layout::tensors(&checkpoint.spec, scheme, head);
        if origin == Origin::Foreign {
            mixed(&mut tensors, &found)?;
        }
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
        Self::read(Self::builtin_file())
    }

    /// The file of kipp-tiny, as it is part of the program.
    pub fn builtin_file() -> Bytes {
        let file: &'static [u8] = &BUILTIN.0;
        Bytes::new(file)
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

    /// The same weights under another scheme, in memory. What is already quantised loses twice.
    pub fn requantised(&self, scheme: Scheme) -> Result<Self> {
        let schemes = (scheme, scheme.default_head());
        Self::encode(self.identity, schemes, self.origin.clone(), &self.weights)
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

/// Takes over what other programs choose for themselves: the type of each matrix, and a head of its own.
fn mixed(tensors: &mut Vec<Tensor>, found: &HashMap<&str, &TensorInfo>) -> Result<()> {
    let head = "output.weight";
    if found.contains_key(head) && tensors.iter().all(|tensor| tensor.name != head) {
        let embedding = tensors.iter().find(|tensor| tensor.role == Role::Head).cloned();
        tensors.extend(embedding.map(|embedding| Tensor { name: head.into(), ..embedding }));
    }
    for tensor in tensors.iter_mut().filter(|tensor| tensor.role != Role::Norm) {
        if let Some(found) = found.get(&*tensor.name) {
            tensor.ty = scheme_of(&found.name, found.ty)?.tensor_type();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use super::*;
    use crate::gguf::{Value, Writer};

    #[test]
    fn the_builtin_model_is_kipp_tiny() {
        let model = Model::builtin().unwrap();
        let tiny = Checkpoint::find("kipp-tiny").unwrap();
        assert_eq!(model.checkpoint(), Some(tiny));
        assert_eq!((model.scheme, model.head), (Scheme::Bf16, Scheme::Bf16));
        let sha256 = vec![format!("{}  model.safetensors", tiny.revision)];
        assert_eq!(model.origin, Origin::Pinned { sha256 });
        assert_eq!(model.weights.embedding.bytes().as_ptr() as usize % 64, 0);
        assert!(Gguf::read(Bytes::new(&BUILTIN.0[..])).unwrap().check_values().is_ok());
    }

    /// The file of a synthetic checkpoint whose weights are a hole: of the right size, and quick to
    /// make.
    struct Hollow(PathBuf);

    impl Hollow {
        fn new(id: &str, edit: impl Fn(&mut Vec<(String, Value)>)) -> Self {
            let checkpoint = Checkpoint::find(id).unwrap();
            let origin = Origin::Synthetic { seed: 1 };
            let mut metadata = metadata::describe(checkpoint, Scheme::Q4_0, &origin);
            edit(&mut metadata);
            let tensors = layout::tensors(&checkpoint.spec, Scheme::Q4_0, Scheme::Q8_0);
            let path = std::env::temp_dir().join(format!("kipp-{}-{id}.gguf", std::process::id()));
            let file = File::create(&path).unwrap();
            Writer::new(&file, &metadata, &tensors).unwrap();
            let data: usize = tensors.iter().map(|t| t.bytes().next_multiple_of(32)).sum();
            file.set_len(file.metadata().unwrap().len() + data as u64).unwrap();
            Self(path)
        }
    }

    impl Drop for Hollow {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).unwrap();
        }
    }

    /// Time is this thread's on a processor, because other tests and other programs run beside it.
    #[test]
    #[cfg(target_os = "linux")]
    fn opening_is_quick_and_leaves_the_weights_alone() {
        let on_cpu = || {
            let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
            stat.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        };
        let file = Hollow::new("qwen3-0.6b", |_| {});
        let start = on_cpu();
        let model = Model::open(&file.0).unwrap();
        let nanoseconds = on_cpu() - start;
        assert_eq!(model.checkpoint().unwrap().id, "qwen3-0.6b");
        assert_eq!(model.origin, Origin::Synthetic { seed: 1 });
        assert_eq!(model.weights.layers[27].down.row_bytes(1023), [0; 1728]);
        let (mapped, resident) = mapping_kib(&file.0);
        println!("opened in {nanoseconds} ns, {resident} KiB of {mapped} KiB were read");
        assert!(nanoseconds < 100_000_000);
        assert!(mapped > 400_000 && resident < 20_000);
    }

    /// Size of a file's mapping in this process and how much of it is in memory.
    #[cfg(target_os = "linux")]
    fn mapping_kib(path: &Path) -> (usize, usize) {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, map) = maps.split_once(path.to_str().unwrap()).unwrap();
        let field = |name| {
            let (_, value) = map.split_once(name).unwrap();
            value.split_whitespace().next().unwrap().parse().unwrap()
        };
        (field("\nSize:"), field("\nRss:"))
    }

    #[test]
    fn files_of_other_programs_are_told_apart_by_dimensions_and_name() {
        let open = |id, name: &str| {
            let file = Hollow::new(id, |metadata| {
                metadata.retain(|(key, _)| !key.starts_with("kipp."));
                for (key, value) in metadata {
                    if key == "general.name" {
                        *value = Value::String(name.into());
                    }
                }
            });
            Model::open(&file.0)
        };
        let model = open("qwen3-1.7b", "anything").unwrap();
        assert_eq!((model.checkpoint().unwrap().id, model.origin), ("qwen3-1.7b", Origin::Foreign));
        assert_eq!((model.scheme, model.head), (Scheme::Q4_0, Scheme::Q8_0));

        let id = "qwen3-4b-thinking-2507";
        let model = open(id, "Qwen3 4B Thinking 2507").unwrap();
        assert_eq!(model.checkpoint().unwrap().id, id);
        let error = open(id, "Qwen3 4B 2507").err().unwrap().to_string();
        assert!(
            error.contains("dimensions: expected those of one registered checkpoint"),
            "{error}"
        );
    }
}
