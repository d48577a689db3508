//! The gates on the oracle itself: what is to hold bit for bit does, and a backend with a planted fault
//! does not pass.

use std::sync::Arc;

use engine::Oracle;
use engine::conformance::{GATES, Reproducibility, Rig, Subject};
use model::{Model, Scheme, Spec};

/// Small enough for the oracle, ragged enough to be a test: five query heads a key/value head, widths
/// that are multiples of 32 and of nothing larger.
const SPEC: Spec = Spec {
    layers: 2,
    hidden: 160,
    ffn: 352,
    heads: 40,
    vocab: 331,
    context: 2048,
    theta: 1e6,
    tied: false,
};

#[test]
fn the_oracle_passes_its_own_gates() {
    for scheme in [Scheme::Bf16, Scheme::Q4_1] {
        let model = Arc::new(Model::synthetic(SPEC, (scheme, Scheme::Q8_0), 1).expect("synthetic"));
        let mut make = |kv| Ok(Box::new(Oracle::new(Arc::clone(&model), kv, 2)) as Box<_>);
        let mut rig = Rig::new(Subject {
            model: Arc::clone(&model),
            make: &mut make,
            reproducibility: Reproducibility::Bitwise,
            bound: 0.0,
            threads: 1,
            seed: 3,
        });
        for gate in GATES {
            let finding = (gate.run)(&mut rig).expect(gate.name);
            assert!(finding.holds(), "{}: {finding:?}", gate.name);
            println!(
                "{:<14} {:>9.2e} {} ({})",
                gate.name, finding.figure, finding.unit, finding.detail
            );
        }
    }
}
