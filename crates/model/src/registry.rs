//! The one table of checkpoints that kipp runs, each pinned to an upstream revision.

use crate::spec::Spec;

/// Which chat behaviour a checkpoint was trained for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Pretrained only: no chat template.
    Base,
    /// Hybrid thinking, switched by `enable_thinking`.
    Instruct,
    /// Never thinks.
    Instruct2507,
    /// Always thinks; the template opens the `<think>` block itself.
    Thinking2507,
}

/// A pinned checkpoint.
#[derive(Debug, PartialEq)]
pub struct Checkpoint {
    /// Name on the command line, e.g. `qwen3-4b`.
    pub id: &'static str,
    /// Upstream repository; for kipp-tiny this project.
    pub repository: &'static str,
    /// Pinned commit of the repository.
    pub revision: &'static str,
    /// Dimensions.
    pub spec: Spec,
    /// Chat behaviour, which also fixes the stop tokens.
    pub variant: Variant,
}
