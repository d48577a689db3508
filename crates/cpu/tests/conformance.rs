//! The engine's gates on every instruction class of this machine.

#[path = "../../engine/tests/common/gates.rs"]
mod gates;

use std::sync::Arc;

use cpu::{Class, Cpu, CpuModel, Options};
use engine::conformance::{Reproducibility, Rig, Subject};
use gates::RAGGED;
use model::{Model, Scheme, Spec};

fn pass(model: &Arc<Model>, options: Options, bound: f64, seed: u64) {
    let weights = CpuModel::load(Arc::clone(model), options, &mut |_, _| ()).expect("weights");
    let mut make = |kv| Ok(Box::new(Cpu::new(&weights, kv)?) as Box<_>);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(model),
        make: &mut make,
        reproducibility: Reproducibility::Bitwise,
        bound,
        threads: 2,
        seed,
    });
    gates::hold(&mut rig, format_args!("{:?} {:?}", options.class, model.scheme));
}

/// Runs the gates for every scheme, if this machine has the class.
fn class_passes(class: Class) {
    if !Class::available().contains(&class) {
        println!("{class:?}: not on this machine");
        return;
    }
    for (i, scheme) in
        [Scheme::Bf16, Scheme::Q8_0, Scheme::Q4_1, Scheme::Q4_0].into_iter().enumerate()
    {
        let model = Model::synthetic(RAGGED, (scheme, Scheme::Q8_0), 1).expect("synthetic");
        pass(&Arc::new(model), Options { threads: 1 + i % 3, class }, 1e-5, 11 + i as u64);
    }
}

/// The types of other programs' files, with the best instructions, and the forms that the K-quants take with none as well. Blocks of
/// 256 want widths to match.
#[test]
fn foreign_types() {
    let spec = Spec { hidden: 256, ffn: 768, heads: 16, ..RAGGED };
    let schemes = [
        (Scheme::F16, Scheme::F16),
        (Scheme::Q4K, Scheme::Q6K),
        (Scheme::Q5K, Scheme::Q5K),
        (Scheme::Q6K, Scheme::Q8_0),
    ];
    for (i, schemes) in schemes.into_iter().enumerate() {
        let model = Arc::new(Model::synthetic(spec, schemes, 1).expect("synthetic"));
        let portable = (schemes.0 == Scheme::Q4K).then_some(Class::Portable);
        for class in [Class::best()].into_iter().chain(portable) {
            // The scales of K-quants are rounded once more when they are packed.
            let bound = if i == 0 { 1e-5 } else { 3e-5 };
            pass(&model, Options { threads: 1 + i % 3, class }, bound, 31 + i as u64);
        }
    }
}

#[test]
fn avx512_winograd() {
    class_passes(Class::Avx512Winograd);
}

#[test]
fn avx512() {
    class_passes(Class::Avx512);
}

#[test]
fn avx2_vnni() {
    class_passes(Class::Avx2Vnni);
}

#[test]
fn avx2() {
    class_passes(Class::Avx2);
}

#[test]
fn neon() {
    class_passes(Class::Neon);
}

#[test]
fn portable() {
    class_passes(Class::Portable);
}
