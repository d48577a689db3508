//! Before a model is loaded: small products of integers, which have one right answer whatever the order of their sums.
//! A device, or a compiler, that gets them wrong is refused; nothing else is tried in its place.

use engine::BackendError;
use model::Spec;

use crate::device::{Device, Slice};
use crate::kernels::{Libraries, Stream};
use crate::project::{Projections, Target};
use crate::weights::{Kind, Place, Projection};

/// More rows than a tile, and not whole matrices; more columns than a step.
const ROWS: usize = 75;
const COLS: usize = 96;
/// Tokens of both classes: few, and more than a tile of bf16.
const TOKENS: [usize; 2] = [3, 41];

/// Small integers, which bfloat16 holds.
fn integer(i: usize) -> i32 {
    (i.wrapping_mul(2_654_435_761) >> 7) as i32 % 9 - (i % 3) as i32 * 4 + 4
}

/// Checks the projections of bfloat16 weights, exactly.
pub fn run<D: Device>(device: &D, libraries: &Libraries<D>) -> Result<(), BackendError> {
    let spec = Spec {
        layers: 0,
        hidden: COLS,
        ffn: COLS,
        heads: 8,
        vocab: ROWS,
        context: 1,
        theta: 1.0,
        tied: true,
    };
    let kind = Kind::Bf16;
    let projections = Projections::new(device, libraries, &spec, &[(kind, COLS)], false)?;
    let weights = device.allocate(ROWS * COLS * 2, "probe")?;
    let weight = |i| integer(i);
    let upper = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
    let bytes: Vec<u8> = (0..ROWS * COLS).flat_map(|i| upper(weight(i) as f32)).collect();
    device.write(&weights, 0, &bytes);
    let mut queue = device.queue()?;
    for tokens in TOKENS {
        let room = tokens.next_multiple_of(64);
        let x = device.allocate(room * COLS * 4, "probe")?;
        let out = device.allocate(room * ROWS * 4, "probe")?;
        let input = |i| integer(i + 12_345);
        let bytes: Vec<u8> =
            (0..tokens * COLS).flat_map(|i| (input(i) as f32).to_le_bytes()).collect();
        device.write(&x, 0, &bytes);
        let matrix = Projection { kind, rows: ROWS, cols: COLS, place: Place::default() };
        let target = Target { out: Slice::whole(device, &out), residual: false };
        let step = Slice::whole(device, &x); // projections do not read it
        let mut stream = Stream { device, queue: &mut queue, step };
        let parts = [(matrix, Slice::whole(device, &weights))];
        projections.project(&mut stream, &parts, Slice::whole(device, &x), target, tokens)?;
        device.wait(device.commit(&mut queue)?)?;
        let mut found = vec![0; tokens * ROWS * 4];
        device.read(&out, 0, &mut found);
        for (i, found) in found.chunks_exact(4).enumerate() {
            let (token, row) = (i / ROWS, i % ROWS);
            let product = |k: usize| weight(row * COLS + k) * input(token * COLS + k);
            let expected: i32 = (0..COLS).map(product).sum();
            let found = f32::from_le_bytes([found[0], found[1], found[2], found[3]]);
            if found != expected as f32 {
                return Err(BackendError::Unavailable(format!(
                    "probe of {tokens} tokens: expected {expected} at token {token}, row {row}, found {found}"
                )));
            }
        }
    }
    Ok(())
}
