//! Speculation on the CPU backend: the very tokens of plain decoding, over many prompts.

#[path = "../../engine/tests/common/validation.rs"]
mod validation;

use std::sync::Arc;

use cpu::{Cpu, CpuModel, Options};
use engine::conformance::{Reproducibility, Rig, Subject, identity};
use engine::{Backend, BackendError, KvConfig, KvKind};
use model::{Model, Scheme};

fn backend(model: &Arc<Model>, kv: KvConfig) -> Result<Box<dyn Backend>, BackendError> {
    let options = Options { threads: 2, ..Options::default() };
    let packed = CpuModel::load(Arc::clone(model), options, &mut |_, _| ())?;
    Ok(Box::new(Cpu::new(&packed, kv)?))
}

/// Compares all answers by every method with those of plain decoding.
fn identical(count: usize) {
    let model = Arc::new(Model::builtin().expect("the built-in model"));
    let small = Arc::new(model.requantised(Scheme::Q4_0).expect("another scheme"));
    let story = validation::text();
    let mut make = |kv| backend(&model, kv);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(&model),
        make: &mut make,
        reproducibility: Reproducibility::Bitwise,
        bound: 1e-5,
        threads: 2,
        seed: 77,
    });
    let kv = KvConfig { blocks: 300, kind: KvKind::Bf16 };
    let found = identity(&mut rig, &story, count, &mut || backend(&small, kv)).expect("answers");
    for drafted in found {
        println!("{drafted:?}");
        assert_eq!(drafted.same, count, "{drafted:?}");
        let right = drafted.load.accepted;
        assert!(!drafted.always || right > count as u64, "{drafted:?}");
    }
}

#[test]
fn answers_are_those_of_plain_decoding() {
    identical(40);
}

/// `cargo test -p cpu --test speculation -- --ignored --nocapture`
#[test]
#[ignore = "1,000 prompts take minutes"]
fn answers_to_a_thousand_prompts_are_those_of_plain_decoding() {
    identical(1000);
}
