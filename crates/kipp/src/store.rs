//! Where models are: built in, in a file, or in the folder that kipp keeps for them.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use model::registry::CHECKPOINTS;
use model::{Checkpoint, Model, Origin, Scheme};

use crate::output::wrong_usage;

/// Id of the checkpoint that is part of the binary.
pub const BUILTIN: &str = "kipp-tiny";

/// A model as it is named on the command line.
#[derive(Debug, Clone)]
pub enum Reference {
    /// A registry entry, and the scheme if one was named.
    Registered(&'static Checkpoint, Option<Scheme>),
    /// A GGUF file.
    File(PathBuf),
}

impl Reference {
    /// Understands a registry id or the repository that it stands for, with an optional `:scheme`, a path, or nothing:
    /// the built-in model.
    pub fn parse(name: Option<&str>) -> Result<Self> {
        let name = name.unwrap_or(BUILTIN);
        let (id, scheme) = match name.split_once(':') {
            Some((id, scheme)) => (id, Some(scheme)),
            None => (name, None),
        };
        let path = Path::new(name);
        let named = |checkpoint: &&Checkpoint| {
            let names = [checkpoint.id, checkpoint.repository];
            names.iter().any(|name| name.eq_ignore_ascii_case(id)) && !path.exists()
        };
        if let Some(checkpoint) = Checkpoint::find(id).or_else(|| CHECKPOINTS.iter().find(named)) {
            let field = format!("scheme behind `{id}:`");
            let scheme = scheme.map(|scheme| parse_scheme(&field, scheme)).transpose()?;
            return Ok(Reference::Registered(checkpoint, scheme));
        }
        if path.is_dir() {
            return Err(wrong_usage(format!(
                "model: expected a GGUF file or a registry id, found the folder `{name}`; `kipp convert` makes a file of \
                 published safetensors"
            )));
        }
        if path.exists() || name.contains(['/', '\\']) || name.ends_with(".gguf") {
            return Ok(Reference::File(path.to_owned()));
        }
        let known: Vec<&str> = CHECKPOINTS.iter().map(|c| c.id).collect();
        let known = known.join(", ");
        Err(wrong_usage(format!("model: expected a GGUF file or one of {known}, found `{name}`")))
    }

    /// Whether it is the model that is part of the program, as it is stored there.
    pub fn is_builtin(&self) -> bool {
        matches!(self, Reference::Registered(checkpoint, None | Some(Scheme::Bf16)) if checkpoint.id == BUILTIN)
    }

    /// The registry entry, without opening a file where the name says enough.
    pub fn checkpoint(&self) -> Result<&'static Checkpoint> {
        match self {
            Reference::Registered(checkpoint, _) => Ok(checkpoint),
            Reference::File(path) => {
                Model::open(path)?.checkpoint().context("the file is of no registered checkpoint")
            }
        }
    }

    /// The file, where it is in the models' folder.
    pub fn kept(&self) -> Option<PathBuf> {
        match self {
            Reference::Registered(checkpoint, scheme) => find(checkpoint, *scheme).ok(),
            Reference::File(_) => None,
        }
    }

    /// The file, or why there is none.
    pub fn file(&self) -> Result<PathBuf> {
        match self {
            Reference::Registered(checkpoint, scheme) => find(checkpoint, *scheme),
            Reference::File(path) => Ok(path.clone()),
        }
    }

    /// Opens the model.
    pub fn open(&self) -> Result<Arc<Model>> {
        let model = match self {
            Reference::Registered(..) if self.is_builtin() => Model::builtin()?,
            Reference::Registered(checkpoint, Some(scheme))
                if checkpoint.id == BUILTIN && self.kept().is_none() =>
            {
                Model::builtin()?.requantised(*scheme)?
            }
            Reference::Registered(checkpoint, scheme) => {
                open_kept(checkpoint, &find(checkpoint, *scheme)?)?
            }
            Reference::File(path) => Model::open(path)?,
        };
        Ok(Arc::new(model))
    }
}

/// Opens a file of the models' folder, which must be what its name says: it may have been copied there by hand.
pub fn open_kept(checkpoint: &Checkpoint, path: &Path) -> Result<Model> {
    let model = Model::open(path)?;
    let found = model.checkpoint().map_or("another model", |found| found.id);
    let alike = found == checkpoint.id
        || model.origin == Origin::Foreign && *model.spec() == checkpoint.spec;
    if !alike || path_of(checkpoint, model.scheme)? != path {
        bail!(
            "{}: expected what the name says, found {found} in {}",
            path.display(),
            model.scheme.name()
        );
    }
    Ok(model)
}

/// A registry entry by its id; `field` is where the user named it.
pub fn parse_id(field: &str, id: &str) -> Result<&'static Checkpoint> {
    let unknown = || wrong_usage(format!("{field}: expected a registry id, found `{id}`"));
    Checkpoint::find(id).ok_or_else(unknown)
}

/// A scheme by its name; `field` is where the user named it.
pub fn parse_scheme(field: &str, name: &str) -> Result<Scheme> {
    let known = || Scheme::ALL.map(Scheme::name).join(", ");
    let unknown = || wrong_usage(format!("{field}: expected one of {}, found `{name}`", known()));
    Scheme::from_name(name).filter(|scheme| Scheme::ALL.contains(scheme)).ok_or_else(unknown)
}

/// The folder of kipp's own model files: `KIPP_MODELS`, or `kipp/models` where the platform keeps data.
pub fn folder() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("KIPP_MODELS").filter(|f| !f.is_empty()) {
        return Ok(folder.into());
    }
    let data = env::var_os("XDG_DATA_HOME").filter(|f| !f.is_empty()).map(PathBuf::from);
    let home = || env::var_os("HOME").filter(|f| !f.is_empty()).map(PathBuf::from);
    let data = data.or_else(|| Some(home()?.join(".local/share")));
    let data =
        data.context("neither KIPP_MODELS nor XDG_DATA_HOME nor HOME says where models are")?;
    Ok(data.join("kipp/models"))
}

/// The same folder, made if it is not there.
pub fn made_folder() -> Result<PathBuf> {
    let folder = folder()?;
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

/// How the projections and the head are to be stored, where `--head` may say the latter.
pub fn schemes(scheme: Scheme, head: Option<&str>) -> Result<(Scheme, Scheme)> {
    let head = head.map(|head| parse_scheme("--head", head)).transpose()?;
    Ok((scheme, head.unwrap_or(scheme.default_head())))
}

/// What a model's name stands for: its scheme, or all, the most exact first.
pub fn schemes_of(named: Option<Scheme>) -> Vec<Scheme> {
    named.map_or_else(|| Scheme::ALL.to_vec(), |scheme| vec![scheme])
}

/// Where a checkpoint in a scheme is kept.
pub fn path_of(checkpoint: &Checkpoint, scheme: Scheme) -> Result<PathBuf> {
    Ok(folder()?.join(format!("{}-{}.gguf", checkpoint.id, scheme.name())))
}

/// Where it is kept which gates a file passed.
pub fn gates_of(file: &Path) -> PathBuf {
    file.with_added_extension("gates")
}

/// The file of a checkpoint: in the scheme named, or in the most exact one that is here.
fn find(checkpoint: &Checkpoint, scheme: Option<Scheme>) -> Result<PathBuf> {
    for scheme in schemes_of(scheme) {
        let path = path_of(checkpoint, scheme)?;
        if path.exists() {
            return Ok(path);
        }
    }
    let folder = folder()?;
    let (id, folder) = (checkpoint.id, folder.display());
    match scheme.map(Scheme::name) {
        Some(scheme) => {
            bail!("model: {id}:{scheme} is not in {folder}; `kipp pull {id}:{scheme}` brings it")
        }
        None => bail!(
            "model: {id} is not in {folder}; `kipp pull {id}:q8_0` brings it with 8-bit weights, \
             `kipp pull {id}` as it was published"
        ),
    }
}
