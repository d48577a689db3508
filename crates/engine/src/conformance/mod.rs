//! Gates: what a backend must show on the hardware it runs on before it counts as working.
//!
//! Every gate compares the backend with the scalar oracle, or with itself where the promise is that
//! something makes no difference. Inputs are fresh random tokens for every seed. The same gates are run
//! by the tests, on the CPU, and by `kipp verify`, on a user's own machine.

mod gates;
mod identity;
mod rig;
mod speculation;
#[cfg(test)]
mod study;

use std::fmt;
use std::sync::Arc;

use model::Model;

use crate::backend::{Backend, BackendError, KvConfig};

pub use gates::{AGAINST_BF16, GATES};
pub use identity::{Drafted, identity};
pub use rig::{Rig, nmse};

/// One gate.
pub struct Gate {
    /// Short name, used on the command line and in records.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub shows: &'static str,
    /// Runs it.
    pub run: fn(&mut Rig<'_>) -> Result<Finding, BackendError>,
}

/// What a gate found.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The measured figure; smaller is better.
    pub figure: f64,
    /// The gate holds if the figure is at most this.
    pub bound: f64,
    /// What the figure is.
    pub unit: Unit,
    /// Which input gave the worst figure, or what was wrong.
    pub detail: String,
}

/// What a figure measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Sum of squared differences over sum of squares.
    Nmse,
    /// Values whose bits differ.
    DifferingBits,
    /// Answers that differ.
    DifferingAnswers,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::Nmse => "NMSE",
            Unit::DifferingBits => "values that differ",
            Unit::DifferingAnswers => "answers that differ",
        })
    }
}

impl Finding {
    /// Whether the gate holds. NaN never does.
    pub fn holds(&self) -> bool {
        self.figure <= self.bound
    }
}

/// What a backend promises about its own sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reproducibility {
    /// A value is the same bits however it was computed: the CPU's promise.
    Bitwise,
    /// The same bits within a kernel class, and within the bound across classes: a GPU's promise.
    WithinClass,
}

/// Builds a fresh backend with this KV storage.
pub type Make<'a> = dyn FnMut(KvConfig) -> Result<Box<dyn Backend>, BackendError> + 'a;

/// What is tested, and how strictly.
pub struct Subject<'a> {
    /// The model on both sides.
    pub model: Arc<Model>,
    /// Builds the backend under test.
    pub make: &'a mut Make<'a>,
    /// What it promises.
    pub reproducibility: Reproducibility,
    /// Largest NMSE of its logits against the oracle's.
    pub bound: f64,
    /// Threads for the oracle.
    pub threads: usize,
    /// Makes the random inputs.
    pub seed: u64,
}
