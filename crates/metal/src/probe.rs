//! Before a model is loaded: small products of integers, which have one right answer whatever the order of their sums.
//! A class of kernels that the device, or its compiler, gets wrong is refused. Where a class was asked for that ends the
//! load; where none was, the simdgroup matrices have to do, and the banner says why.

use engine::BackendError;
use model::Spec;

use crate::device::{Device, Slice};
use crate::kernels::{Class, Libraries, Stream};
use crate::project::{Projections, Target};
use crate::weights::{Kind, Place, Projection};

type Result<T> = std::result::Result<T, BackendError>;

/// More rows than a tile, and not whole matrices; more columns than a step.
const ROWS: usize = 75;
const COLS: usize = 96;
/// Tokens of both kinds of projection: few, and more than a tile.
const TOKENS: [usize; 2] = [3, 73];

/// Small integers, which bfloat16 and bytes hold.
fn integer(i: usize) -> i32 {
    (i.wrapping_mul(2_654_435_761) >> 7) as i32 % 9 - (i % 3) as i32 * 4 + 4
}

/// The kernels that are to be used, compiled, and what a banner says of them.
pub fn choose<D: Device>(device: &D, asked: Option<Class>) -> Result<(Libraries<D>, String)> {
    let check = |class| {
        let libraries = Libraries::compile(device, class)?;
        [Kind::Bf16, Kind::Q8_0].into_iter().try_for_each(|kind| run(device, &libraries, kind))?;
        Ok((libraries, format!("{} kernels", class.name())))
    };
    match (asked, check(asked.unwrap_or(Class::Tensor))) {
        (None, Err(why)) => {
            let (libraries, class) = check(Class::Simdgroup)?;
            let why = match why {
                BackendError::Unavailable(why) => why,
                other => other.to_string(),
            };
            // A compiler says a lot; its first line says what was wrong.
            Ok((libraries, format!("{class} (tensor: {})", why.lines().next().unwrap_or_default())))
        }
        (_, checked) => checked,
    }
}

/// The matrix of integers as a kind stores it: bfloat16, or blocks with a scale of 1.
fn stored(kind: Kind) -> Vec<u8> {
    let weights: Vec<i32> = (0..ROWS * COLS).map(integer).collect();
    if kind == Kind::Bf16 {
        let upper = |&weight: &i32| (((weight as f32).to_bits() >> 16) as u16).to_le_bytes();
        return weights.iter().flat_map(upper).collect();
    }
    let one = [0x00, 0x3c];
    weights
        .chunks_exact(32)
        .flat_map(|block| one.into_iter().chain(block.iter().map(|&weight| weight as u8)))
        .collect()
}

/// Checks the projections of a kind of weights, exactly.
fn run<D: Device>(device: &D, libraries: &Libraries<D>, kind: Kind) -> Result<()> {
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
    let projections = Projections::new(device, libraries, &spec, &[(kind, COLS)], false)?;
    let bytes = stored(kind);
    let weights = device.allocate(bytes.len(), "probe")?;
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
            let product = |k: usize| integer(row * COLS + k) * input(token * COLS + k);
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
