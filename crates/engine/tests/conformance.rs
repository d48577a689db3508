//! The gates on the oracle itself: what is to hold bit for bit does, and a backend with a planted fault
//! does not pass.

#[path = "common/gates.rs"]
mod gates;

use std::sync::Arc;

use engine::Oracle;
use engine::conformance::{Reproducibility, Rig, Subject};
use model::{Model, Scheme};

#[test]
fn the_oracle_passes_its_own_gates() {
    for scheme in [Scheme::Bf16, Scheme::Q4_1] {
        let model = Arc::new(
            Model::synthetic(gates::RAGGED, (scheme, Scheme::Q8_0), 1).expect("synthetic"),
        );
        let mut make = |kv| Ok(Box::new(Oracle::new(Arc::clone(&model), kv, 2)) as Box<_>);
        let mut rig = Rig::new(Subject {
            model: Arc::clone(&model),
            make: &mut make,
            reproducibility: Reproducibility::Bitwise,
            bound: 0.0,
            threads: 1,
            seed: 3,
        });
        gates::hold(&mut rig, scheme.name());
    }
}
