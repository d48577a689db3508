//! The codecs of the weight schemes: exact layouts, no NaN from any block, and 4-bit scales close
//! to the best there are.

use model::TensorType;
use model::float::{f16_to_f32, f32_to_f16};
use model::scheme::{BLOCK, Unstorable, decode, encode};
use proptest::prelude::*;

const QUANTISED: [TensorType; 3] = [TensorType::Q8_0, TensorType::Q4_1, TensorType::Q4_0];

fn encoded(ty: TensorType, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; ty.row_bytes(values.len())];
    encode(ty, values, None, &mut out).unwrap();
    out
}

fn decoded(ty: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / ty.block_bytes() * ty.block()];
    decode(ty, bytes, &mut out);
    out
}

fn round_trip(ty: TensorType, values: &[f32]) -> Vec<f32> {
    decoded(ty, &encoded(ty, values))
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
}

/// Quantisation by the extreme values alone, as ggml's reference does it but against the stored
/// scale.
fn plain(ty: TensorType, block: &[f32]) -> Vec<f32> {
    let half = |value| f16_to_f32(f32_to_f16(value));
    let low = block.iter().copied().fold(f32::INFINITY, f32::min);
    let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scale, minimum, range) = match ty {
        TensorType::Q4_1 => (half((high - low) / 15.0), half(low), (0.0, 15.0)),
        TensorType::Q4_0 => (half(if high > -low { high } else { low } / -8.0), 0.0, (-8.0, 7.0)),
        _ => unreachable!(),
    };
    let quant = |x: f32| match scale {
        0.0 => 0.0,
        _ => ((x - minimum) / scale).round().clamp(range.0, range.1),
    };
    block.iter().map(|&x| scale * quant(x) + minimum).collect()
}

/// The least squared error that any real scale gives a Q4_0 block. Between two neighbouring scales
/// at which some value passes from one quant to the next the quants are fixed, and the best scale
/// is known.
fn least_q4_0_error(block: &[f32]) -> f64 {
    let x: Vec<f64> = block.iter().map(|&x| x.into()).collect();
    let energy: f64 = x.iter().map(|x| x * x).sum();
    let mut edges: Vec<f64> =
        x.iter().flat_map(|x| (-8..7).map(move |q| x / (f64::from(q) + 0.5))).collect();
    edges.sort_by(f64::total_cmp);
    let gain = |scale: f64| {
        let quants = x.iter().map(|x| (x / scale).round().clamp(-8.0, 7.0));
        let (xq, qq) = quants.zip(&x).fold((0.0, 0.0), |(xq, qq), (q, x)| (xq + x * q, qq + q * q));
        if qq > 0.0 { xq * xq / qq } else { 0.0 }
    };
    let scales = edges.windows(2).map(|edge| (edge[0] + edge[1]) / 2.0);
    scales
        .filter(|&scale| scale != 0.0)
        .fold(energy, |least, scale| least.min(energy - gain(scale)))
}

/// Blocks of about normal values, some with an outlier, some off centre.
fn blocks() -> impl Strategy<Value = Vec<f32>> {
    let normal = prop::collection::vec(-1f32..1.0, 4 * BLOCK)
        .prop_map(|v| v.chunks(4).map(|c| c.iter().sum::<f32>() * 0.02).collect::<Vec<f32>>());
    (normal, 0usize..BLOCK, 0f32..8.0, -0.05f32..0.05, any::<bool>()).prop_map(
        |(mut x, at, factor, centre, shaped)| {
            if shaped {
                x[at] *= factor;
                x.iter_mut().for_each(|x| *x += centre);
            }
            x
        },
    )
}

#[test]
fn blocks_of_the_cases_decode_within_their_bounds() {
    let ramp: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 8.0).collect();
    let mut spike = vec![0.0; 32];
    spike[31] = -8.0;
    // Values, then the largest error that the reference's blocks have, as Q8_0, Q4_1 and Q4_0.
    let cases = [
        (vec![0.0; 32], [0.0, 0.0, 0.0]),
        (vec![1e-7; 32], [1.0000000116860974e-7, 1.9209288382171508e-8, 1.0000000116860974e-7]),
        (vec![1e-42; 32], [1.0005271035279194e-42; 3]),
        (ramp, [0.0078125, 0.125, 0.125]),
        (spike, [0.00048828125, 0.001953125, 0.0]),
    ];
    for (values, bounds) in cases {
        for (ty, bound) in QUANTISED.into_iter().zip(bounds) {
            let back = round_trip(ty, &values);
            for (x, y) in values.iter().zip(&back) {
                assert!(y.is_finite());
                assert!(f64::from((x - y).abs()) <= bound, "{ty}: {x:e} became {y:e}");
            }
        }
    }
}

/// The same cases' blocks, bit for bit where the reference defines the encoding.
#[test]
fn tiny_q8_0_blocks_are_those_of_the_case() {
    assert_eq!(encoded(TensorType::Q8_0, &[0.0; 32]), [0; 34]);
    let tiny: Vec<u8> = [0, 0].into_iter().chain([0x7f; 32]).collect();
    assert_eq!(encoded(TensorType::Q8_0, &[1e-7; 32]), tiny);
}

#[test]
fn layouts_are_those_of_gguf() {
    // Scale 1, then the quants of element j in the lower half and of j + 16 in the upper half of
    // byte j.
    let q4_0: Vec<u8> =
        [0x00, 0x3c].into_iter().chain((0..16).map(|j| j | (15 - j) << 4)).collect();
    let values: Vec<f32> =
        (0..16).map(|j| j as f32 - 8.0).chain((0..16).map(|j| 7.0 - j as f32)).collect();
    assert_eq!(decoded(TensorType::Q4_0, &q4_0), values);
    assert_eq!(encoded(TensorType::Q4_0, &values), q4_0);

    // Scale 0.5, minimum -3.
    let q4_1: Vec<u8> =
        [0x00, 0x38, 0x00, 0xc2].into_iter().chain((0..16).map(|j| j | (15 - j) << 4)).collect();
    let values: Vec<f32> = (0..16).chain((0..16).rev()).map(|q| q as f32 * 0.5 - 3.0).collect();
    assert_eq!(decoded(TensorType::Q4_1, &q4_1), values);
    assert_eq!(encoded(TensorType::Q4_1, &values), q4_1);

    // Scale 0.25.
    let q8_0: Vec<u8> =
        [0x00, 0x34].into_iter().chain((0..32).map(|j| (127 - 8 * j) as u8)).collect();
    let values: Vec<f32> = (0..32).map(|j| (127 - 8 * j) as f32 * 0.25).collect();
    assert_eq!(decoded(TensorType::Q8_0, &q8_0), values);
    assert_eq!(encoded(TensorType::Q8_0, &values), q8_0);
}

/// ggml's reference encoder from its definition: integers under the scale before it is stored.
fn reference_q8_0(block: &[f32]) -> Vec<u8> {
    let scale = block.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let quants = block.iter().map(|x| (x * inverse).round() as i8 as u8);
    f32_to_f16(scale).to_le_bytes().into_iter().chain(quants).collect()
}

/// The K-quants' layouts, on blocks written out by hand.
#[test]
fn k_quants_are_laid_out_as_ggml_says() {
    // Scale 1, minimum 2; part 1 has the factors 3 and 5, part 6 has 33 and 34, whose upper bits lie elsewhere.
    let mut q4_k = vec![0u8; 144];
    q4_k[..4].copy_from_slice(&[0x00, 0x3c, 0x00, 0x40]);
    q4_k[4 + 1] = 3;
    q4_k[8 + 1] = 5;
    q4_k[12 + 2] = (33 & 15) | (34 & 15) << 4;
    q4_k[4 + 2] |= 33 >> 4 << 6;
    q4_k[8 + 2] |= 34 >> 4 << 6;
    q4_k[16 + 7] = 9 << 4; // Part 1, element 7.
    q4_k[16 + 3 * 32 + 4] = 11; // Part 6, element 4.
    let values = decoded(TensorType::Q4K, &q4_k);
    let at = |values: &[f32], part: usize, i: usize| values[part * 32 + i];
    assert_eq!((at(&values, 1, 7), at(&values, 1, 8)), (3.0 * 9.0 - 10.0, -10.0));
    assert_eq!((at(&values, 6, 4), at(&values, 0, 0)), (33.0 * 11.0 - 68.0, 0.0));

    // The same with a fifth bit for element 7 of part 1.
    let mut q5_k = q4_k[..16].to_vec();
    q5_k.extend((0..32).map(|i| if i == 7 { 1 << 1 } else { 0 }));
    q5_k.extend(&q4_k[16..]);
    let values = decoded(TensorType::Q5K, &q5_k);
    assert_eq!((at(&values, 1, 7), at(&values, 6, 4)), (3.0 * 25.0 - 10.0, 33.0 * 11.0 - 68.0));

    // Scale 0.5; the factor of elements 80 to 95 is -2, their code 0x2b: 11 in the lower bits, 2 in the upper.
    let mut q6_k = vec![0u8; 210];
    q6_k[208..].copy_from_slice(&[0x00, 0x38]);
    q6_k[192 + 5] = -2i8 as u8;
    q6_k[80 - 64] = 11 << 4; // Run 2 of the first half: upper nibbles of its first 32 bytes.
    q6_k[128 + 80 - 64] = 2 << 4;
    let values = decoded(TensorType::Q6K, &q6_k);
    assert_eq!((values[80], values[81], values[0]), (-(43.0 - 32.0), 32.0, 0.0));
}

#[test]
fn made_up_k_quants_stay_close() {
    let values: Vec<f32> = (0..1024).map(|i| ((i * i % 509) as f32 / 509.0 - 0.4) * 0.1).collect();
    for (ty, bound) in [(TensorType::Q4K, 2e-2), (TensorType::Q5K, 5e-3), (TensorType::Q6K, 2e-3)] {
        let energy: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        let error = squared_error(&values, &round_trip(ty, &values)) / energy;
        println!("{ty}: NMSE {error:.1e}");
        assert!(error < bound, "{ty}: {error:e}");
    }
}

#[test]
fn what_cannot_be_stored_is_refused_with_its_place() {
    for ty in [TensorType::F32, TensorType::Bf16].into_iter().chain(QUANTISED) {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 64];
            values[41] = value;
            let mut out = vec![0; ty.row_bytes(64)];
            let Unstorable { index, value: found } =
                encode(ty, &values, None, &mut out).unwrap_err();
            assert_eq!((index, found.to_bits()), (41, value.to_bits()));
        }
    }
    // The largest value of each type stays finite, the next one is refused.
    let largest = [
        (TensorType::Bf16, f32::from_bits(0x7f7f_7fff)),
        (TensorType::Q8_0, 127.0 * 65504.0),
        (TensorType::Q4_1, 65504.0),
        (TensorType::Q4_0, 8.0 * 65504.0),
    ];
    for (ty, value) in largest {
        for value in [value, -value] {
            let mut values = vec![0.0; 32];
            values[3] = value;
            assert!(round_trip(ty, &values).iter().all(|x| x.is_finite()), "{ty}");
            values[3] = value * 1.000_001;
            assert!(encode(ty, &values, None, &mut vec![0; ty.row_bytes(32)]).is_err(), "{ty}");
        }
    }
}

#[test]
fn values_of_every_magnitude_stay_finite_and_close() {
    for exponent in -149..=15 {
        let unit = 2f32.powi(exponent);
        let values: Vec<f32> = (0..32).map(|i| (i as f32 - 11.0) / 21.0 * unit).collect();
        for ty in QUANTISED {
            let steps = if ty == TensorType::Q8_0 { 127.0 } else { 15.0 };
            // Half a step and the rounding of the scale; or, where there is no smaller half, what half of the
            // distance of two comes to: 127 times for q8_0's largest value, whose integers do not know of it.
            let smallest = 2f32.powi(-24);
            let bound = match ty {
                TensorType::Q8_0 => unit / steps + 64.0 * smallest,
                _ => f32::max(unit / steps, 8.0 * smallest),
            };
            for (x, y) in values.iter().zip(round_trip(ty, &values)) {
                assert!((x - y).abs() <= bound, "{ty}: {x:e} became {y:e}");
            }
        }
    }
}

#[test]
fn importance_moves_the_error_to_where_it_matters_least() {
    let values: Vec<f32> = (0..64 * BLOCK).map(|i| (i * i % 509) as f32 / 509.0 - 0.5).collect();
    let importance: Vec<f32> =
        (0..64 * BLOCK).map(|i| if i % 5 == 0 { 20.0 } else { 1.0 }).collect();
    let weighted_error = |back: &[f32]| {
        let errors = values.iter().zip(back).map(|(x, y)| f64::from(x - y).powi(2));
        errors.zip(&importance).map(|(error, &w)| error * f64::from(w)).sum::<f64>()
    };
    for (ty, bound) in [(TensorType::Q4_1, 0.8), (TensorType::Q4_0, 0.8)] {
        let mut out = vec![0; ty.row_bytes(values.len())];
        encode(ty, &values, Some(&importance), &mut out).unwrap();
        let ratio = weighted_error(&decoded(ty, &out)) / weighted_error(&round_trip(ty, &values));
        println!("{ty}: weighted error {ratio:.3} of that without importance");
        assert!(ratio < bound, "{ty}: {ratio}");
    }
    // Where nothing matters anything finite will do.
    for ty in QUANTISED {
        let mut out = vec![0; ty.row_bytes(BLOCK)];
        encode(ty, &values[..BLOCK], Some(&[0.0; BLOCK]), &mut out).unwrap();
        assert!(decoded(ty, &out).iter().all(|x| x.is_finite()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn q8_0_is_the_reference_encoder(x in blocks()) {
        prop_assert_eq!(encoded(TensorType::Q8_0, &x), reference_q8_0(&x));
    }

    #[test]
    fn the_search_is_never_worse_than_min_and_max(x in blocks()) {
        for ty in [TensorType::Q4_1, TensorType::Q4_0] {
            let (searched, plain) = (squared_error(&x, &round_trip(ty, &x)), squared_error(&x, &plain(ty, &x)));
            prop_assert!(searched <= plain * (1.0 + 1e-5), "{}: {:e} against {:e}", ty, searched, plain);
        }
    }

    // 0.1 % above the least on average; of 400,000 such blocks the worst was 14 % above it, and one of 24 % is known.
    #[test]
    fn the_q4_0_search_comes_close_to_the_best_scale(x in blocks()) {
        let (searched, least) = (squared_error(&x, &round_trip(TensorType::Q4_0, &x)), least_q4_0_error(&x));
        prop_assert!(searched <= least * 1.3, "{:e} against {:e}", searched, least);
    }

    #[test]
    fn what_was_decoded_encodes_to_the_same_values(x in blocks()) {
        for ty in QUANTISED {
            let once = round_trip(ty, &x);
            // A Q4_1 block that leaves quants unused can be written with several minimums, and the one
            // that is chosen, perhaps larger than every value, is rounded to a half.
            let largest = once.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let tolerance = if ty == TensorType::Q4_1 { largest / 512.0 } else { 0.0 };
            for (a, b) in once.iter().zip(round_trip(ty, &once)) {
                prop_assert!((a - b).abs() <= tolerance, "{}: {} became {}", ty, a, b);
            }
        }
    }

    #[test]
    fn no_bits_of_any_block_make_the_codecs_panic(bits in prop::collection::vec(any::<u32>(), BLOCK)) {
        let x: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        for ty in QUANTISED {
            let mut out = vec![0; ty.row_bytes(BLOCK)];
            let fits = encode(ty, &x, None, &mut out).is_ok();
            prop_assert!(!fits || decoded(ty, &out).iter().all(|y| y.is_finite()));
        }
    }
}

/// On the whole the search has to be clearly better than the extreme values alone.
#[test]
fn the_search_clearly_beats_min_and_max_on_trained_and_synthetic_weights() {
    let tiny = model::Model::builtin().unwrap();
    let spec = *tiny.spec();
    let bf16 = (model::Scheme::Bf16, model::Scheme::Bf16);
    let synthetic = model::Model::synthetic(spec, bf16, 7).unwrap();
    for (name, model) in [("kipp-tiny", &tiny), ("synthetic", &synthetic)] {
        for (ty, bound) in [(TensorType::Q4_0, 0.90), (TensorType::Q4_1, 0.79)] {
            let (mut searched, mut unsearched) = (0.0, 0.0);
            for layer in &model.weights.layers {
                for matrix in layer.projections() {
                    let mut row = vec![0.0; matrix.cols];
                    for i in (0..matrix.rows).step_by(16) {
                        matrix.row_f32(i, &mut row);
                        searched += squared_error(&row, &round_trip(ty, &row));
                        unsearched +=
                            row.chunks(BLOCK).map(|x| squared_error(x, &plain(ty, x))).sum::<f64>();
                    }
                }
            }
            let ratio = searched / unsearched;
            println!("{name} {ty}: squared error {ratio:.3} of min and max");
            assert!(ratio < bound, "{name} {ty}: {ratio}");
        }
    }
}
