//! `kipp inspect`: what is in a model file, and what it takes to run it.

use std::collections::BTreeMap;

use anyhow::Result;
use engine::{KvConfig, KvKind};
use model::Model;
use model::gguf::{Gguf, Value as Field};
use serde_json::{Map, Value, json};

use crate::options::parse_size;
use crate::output::{origin, print, size};
use crate::store::Reference;

/// Says what is in a model file.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file, or a registry id with an optional :scheme whose file is here
    #[arg(value_name = "FILE")]
    model: String,
    /// Positions to state the KV cache's size for; the checkpoint's context if left out
    #[arg(long, value_parser = parse_size)]
    ctx: Option<usize>,
    /// List the tensors too
    #[arg(long)]
    tensors: bool,
    /// Print a JSON object, tensors included
    #[arg(long)]
    json: bool,
}

/// Runs the verb.
pub fn run(args: Args) -> Result<()> {
    let reference = Reference::parse(Some(&args.model))?;
    let (gguf, model) = if reference.is_builtin() {
        (Gguf::read(Model::builtin_file())?, Model::builtin()?)
    } else {
        let file = reference.file()?;
        (Gguf::open(&file)?, Model::open(&file)?)
    };
    let found = Found::new(gguf, model, args.ctx);
    match args.json {
        true => print(&format!("{}\n", found.report())),
        false => print(&found.text(args.tensors)),
    }
}

/// A model file.
struct Found {
    gguf: Gguf,
    model: Model,
    /// Id and chat behaviour of the registry entry.
    id: &'static str,
    variant: String,
    /// Bytes of all tensors.
    weights: u64,
    /// Positions of the KV cache, and its bytes by how it is stored.
    context: usize,
    kv_bf16: u64,
    kv_q8_0: u64,
}

impl Found {
    fn new(gguf: Gguf, model: Model, context: Option<usize>) -> Self {
        let context = context.unwrap_or(model.spec().context);
        let kv = |kind| KvConfig::for_positions(context, kind).bytes(model.spec().layers);
        let (id, variant) = match model.checkpoint() {
            Some(checkpoint) => (checkpoint.id, format!("{:?}", checkpoint.variant)),
            None => ("none", "none".to_string()),
        };
        Found {
            id,
            variant,
            weights: gguf.tensors.iter().map(|tensor| tensor.range.len() as u64).sum(),
            context,
            kv_bf16: kv(KvKind::Bf16),
            kv_q8_0: kv(KvKind::Q8_0),
            gguf,
            model,
        }
    }

    fn report(&self) -> Value {
        let fields = self.gguf.metadata.iter();
        let metadata: Map<String, Value> =
            fields.map(|(key, field)| (key.clone(), value(field))).collect();
        let tensors = self.gguf.tensors.iter().map(|tensor| {
            json!({
                "name": tensor.name,
                "type": tensor.ty.to_string(),
                "dims": tensor.dims,
                "offset": tensor.range.start,
                "bytes": tensor.range.len(),
            })
        });
        json!({
            "checkpoint": self.id,
            "variant": self.variant,
            "origin": origin(&self.model),
            "scheme": self.model.scheme.name(),
            "head": self.model.head.name(),
            "types": types(&self.gguf).into_iter().collect::<BTreeMap<_, _>>(),
            "memory": {
                "weights_bytes": self.weights,
                "context": self.context,
                "kv_bf16_bytes": self.kv_bf16,
                "kv_q8_0_bytes": self.kv_q8_0,
                "total_bytes": self.weights + self.kv_bf16,
            },
            "metadata": metadata,
            "tensors": tensors.collect::<Vec<_>>(),
        })
    }

    fn text(&self, tensors: bool) -> String {
        let Found { id, variant, context, weights, kv_bf16, kv_q8_0, .. } = self;
        let types: Vec<String> =
            types(&self.gguf).iter().map(|(name, count)| format!("{count} {name}")).collect();
        let mut text = format!(
            "checkpoint  {id} ({variant})\norigin      {}\nscheme      {}, embedding and head {}\n\
             weights     {} in {}\nKV cache    {} (bf16) or {} (q8_0) for {context} positions\n\
             memory      {} with a bf16 cache\n\n",
            origin(&self.model),
            self.model.scheme.name(),
            self.model.head.name(),
            size(*weights),
            types.join(", "),
            size(*kv_bf16),
            size(*kv_q8_0),
            size(weights + kv_bf16),
        );
        for (key, field) in &self.gguf.metadata {
            text += &format!("{key} = {}\n", brief(field));
        }
        if tensors {
            text += "\n";
            for tensor in &self.gguf.tensors {
                text += &format!(
                    "{:<32} {:>5} {:>16} {:>9}\n",
                    tensor.name,
                    tensor.ty.to_string(),
                    format!("{:?}", tensor.dims),
                    size(tensor.range.len() as u64),
                );
            }
        }
        text
    }
}

/// How many tensors there are of each type.
fn types(gguf: &Gguf) -> Vec<(String, usize)> {
    let mut types: Vec<(String, usize)> = Vec::new();
    for tensor in &gguf.tensors {
        let name = tensor.ty.to_string();
        match types.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => types.push((name, 1)),
        }
    }
    types
}

/// A metadata value as JSON; arrays by what they hold.
fn value(field: &Field) -> Value {
    match (field, field.as_u64()) {
        (Field::String(text), _) => json!(text),
        (Field::Bool(flag), _) => json!(flag),
        (Field::F32(number), _) => json!(number),
        (Field::F64(number), _) => json!(number),
        (_, Some(number)) => json!(number),
        (other, None) => json!(other.to_string()),
    }
}

/// A metadata value on one line of bounded length.
fn brief(field: &Field) -> String {
    const LONGEST: usize = 80;
    let text = field.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
