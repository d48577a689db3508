//! What the tests of the gates share.

use std::fmt::Display;

use engine::conformance::{GATES, Rig};

#[path = "ragged.rs"]
mod ragged;

pub use ragged::RAGGED;

/// Asserts that every gate holds, and prints what each found of `what`.
pub fn hold(rig: &mut Rig<'_>, what: impl Display) {
    for gate in GATES {
        let finding = (gate.run)(rig).expect(gate.name);
        println!(
            "{what} {:<14} {:>9.2e} {} ({})",
            gate.name, finding.figure, finding.unit, finding.detail
        );
        assert!(finding.holds(), "{what}, {}: {finding:?}", gate.name);
    }
}
