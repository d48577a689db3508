//! What the tests of the gates share.

use std::fmt::Display;

use engine::conformance::{GATES, Rig};
use model::Spec;

/// Small enough for the oracle; widths that are multiples of 32 and of nothing larger, five query heads a KV head, and
/// a vocabulary that fills no panel.
pub const RAGGED: Spec = Spec {
    layers: 2,
    hidden: 160,
    ffn: 352,
    heads: 40,
    vocab: 331,
    context: 2048,
    theta: 1e6,
    tied: false,
};

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
