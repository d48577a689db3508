//! Which gate sees which mistake: every fault is planted alone into a backend that is otherwise the
//! oracle, and all gates are run. The table is kept in docs/gates.md.

use std::fmt::Write;
use std::sync::Arc;

use model::{Model, Scheme, Spec};

use super::{GATES, Reproducibility, Rig, Subject};
use crate::backend::{Backend, BackendError, Limits};
use crate::batch::{Batch, Input, Output, Want};
use crate::oracle::Oracle;
use crate::oracle::faults::{Fault, Faults};

/// Mistakes in what a backend makes of a batch, before it computes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Misread {
    /// Positions from 64 on go to the block before theirs.
    BlockAddressing,
    /// The second and later sequences of a call use the first one's blocks.
    NeighbourTable,
    /// Copies of blocks are not made.
    LostCopy,
    /// The last token of a call of more than 16 is not read.
    LostToken,
    /// Answers belong to the token before the one that was asked for.
    RowBefore,
    /// All draws of a sequence use the noise of the first.
    SharedNoise,
    /// Penalties forget the last token.
    ShortHistory,
}

struct Faulty {
    oracle: Oracle,
    misread: Option<Misread>,
}

impl Backend for Faulty {
    fn limits(&self) -> Limits {
        self.oracle.limits()
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        let mut batch = batch.clone();
        match self.misread {
            None => {}
            Some(Misread::BlockAddressing) => {
                for table in batch.tables.iter_mut().filter(|table| table.len() > 2) {
                    table[2] = table[1];
                }
            }
            Some(Misread::NeighbourTable) => {
                let first = batch.tables.first().cloned().unwrap_or_default();
                for table in &mut batch.tables {
                    table.iter_mut().zip(&first).for_each(|(block, first)| *block = *first);
                }
            }
            Some(Misread::LostCopy) => batch.copies.clear(),
            Some(Misread::LostToken) => {
                if batch.tokens.len() > 16
                    && let Some(last) = batch.tokens.last_mut()
                {
                    *last = Input::Token(0);
                }
            }
            Some(Misread::RowBefore) => {
                for row in &mut batch.rows {
                    row.token = row.token.saturating_sub(1);
                }
            }
            Some(Misread::SharedNoise) => {
                let mut previous = None;
                for row in &mut batch.rows {
                    let sequence = batch.offsets.partition_point(|&offset| offset <= row.token);
                    if let Want::Sample(sample) = &mut row.want {
                        match previous {
                            Some((s, position)) if s == sequence => sample.position = position,
                            _ => previous = Some((sequence, sample.position)),
                        }
                    }
                }
            }
            Some(Misread::ShortHistory) => {
                for row in &mut batch.rows {
                    if let Want::Sample(sample) = &mut row.want {
                        sample.history.pop();
                    }
                }
            }
        }
        self.oracle.submit(&batch)
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        self.oracle.collect(out)
    }
}

const SPEC: Spec = Spec {
    layers: 1,
    hidden: 96,
    ffn: 160,
    heads: 8,
    vocab: 331,
    context: 512,
    theta: 1e6,
    tied: false,
};

/// Names of the gates that fail with these faults.
fn caught(
    model: &Arc<Model>,
    planted: Option<Fault>,
    misread: Option<Misread>,
) -> Vec<&'static str> {
    let mut make = |kv| {
        let mut oracle = Oracle::new(Arc::clone(model), kv, 1);
        oracle.faults = Faults { planted };
        Ok(Box::new(Faulty { oracle, misread }) as Box<dyn Backend>)
    };
    let subject = Subject {
        model: Arc::clone(model),
        make: &mut make,
        reproducibility: Reproducibility::Bitwise,
        bound: 1e-4,
        threads: 1,
        seed: 5,
    };
    let mut rig = Rig::new(subject).with_longest(130);
    let fails = |rig: &mut Rig<'_>, gate: &super::Gate| {
        // A gate that cannot go on has seen something as well.
        (gate.run)(rig).map_or(true, |finding| !finding.holds())
    };
    GATES.iter().filter(|gate| fails(&mut rig, gate)).map(|gate| gate.name).collect()
}

#[test]
fn every_planted_fault_is_caught() {
    use Fault::{
        DroppedTail, MaskLong, MaskShort, RopePosition, SlotOrder, StaleScratch, SwappedKv,
    };
    use Misread::{
        BlockAddressing, LostCopy, LostToken, NeighbourTable, RowBefore, SharedNoise, ShortHistory,
    };
    let schemes = (Scheme::Q8_0, Scheme::Q8_0);
    let model = Arc::new(Model::synthetic(SPEC, schemes, 1).expect("synthetic"));
    assert!(caught(&model, None, None).is_empty(), "the oracle passes");
    let planted = [
        (SlotOrder, "slots of a block exchanged when written"),
        (SwappedKv, "keys stored as values and values as keys"),
        (RopePosition, "rotary positions counted from the beginning of the call"),
        (StaleScratch, "attention of the ninth token on leaves what was there"),
        (DroppedTail, "the last outputs of a matrix not computed"),
        (MaskShort, "a token does not see itself"),
        (MaskLong, "a token sees the position behind it"),
    ];
    let misreads = [
        (BlockAddressing, "positions from 64 on in the block before theirs"),
        (NeighbourTable, "sequences read through the first one's table"),
        (LostCopy, "copy-on-write without the copy"),
        (LostToken, "the last of more than 16 tokens not read"),
        (RowBefore, "answers of the row before"),
        (SharedNoise, "all draws of a sequence use the first one's noise"),
        (ShortHistory, "penalties forget the last token"),
    ];
    let planted = planted.map(|(fault, what)| (what, caught(&model, Some(fault), None)));
    let misreads = misreads.map(|(fault, what)| (what, caught(&model, None, Some(fault))));
    let mut table = String::from("| fault | gates that fail |\n|---|---|\n");
    for (what, gates) in planted.iter().chain(&misreads) {
        assert!(!gates.is_empty(), "{what}: no gate sees it");
        writeln!(table, "| {what} | {} |", gates.join(", ")).expect("a string");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gates.md");
    let document = std::fs::read_to_string(path).expect("docs/gates.md");
    assert!(document.contains(&table), "docs/gates.md is stale; expected this in it:\n{table}");
}
